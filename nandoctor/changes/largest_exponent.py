"""Subtract the largest exponent of those that only shares are made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from typing import ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.expression import Expression
from nandoctor.changes.places import descendants, dims_of, in_place, site_of
from nandoctor.changes.source_tree import NOT_IN_EACH_RUN, CannotWriteError, SourceTree, grouped
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, PRODUCTS

_GROUPS = "groups"
_STEPS = 8
_OF_SHAPE = frozenset({"shape", "dtype", "device", "ndim", "size", "dim"})
_SUMS = frozenset({"sum", "mean"})
_SCATTERS = {"index_add": ("index_reduce", "index_select"), "scatter_add": ("scatter_reduce", "gather")}
"""Sums into groups, with what takes the maximum of each group, and what gives it back to its members."""


@kind_of_change
class SubtractLargest(SingleEdit):
    """Subtract the largest exponent before an exponential: all powers get a common factor, and their shares stay.

    `along` are the dimensions that the powers are summed along, as code; "" stands for all, "groups" for the groups
    into which they are summed by an index. Whether the step makes shares alone is not looked for: a run has to show it.
    Code that the step did not run may make other things of the powers or of their sum: then nothing is written.
    Small exponents stay as they are: an eps or a mask of -1e9 would not be small beside what is added to them.
    """

    why: ClassVar[str] = "A common factor of all powers cancels in their shares; now none is larger than 1."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["subtract-largest"] = "subtract-largest"
    site: OpSite
    along: str

    @property
    def title(self) -> str:
        return f"Subtract the largest exponent before {self.site.op}{in_place(self.site)}"

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        _check_reads(expression, source.ops)
        exponent = expression.argument_node("self")
        first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
        if self.along == _GROUPS:
            largest = _largest_of_groups(expression, again, source.ops)
        else:
            largest = f"{again}.amax({f'{self.along}, keepdim=True' if self.along else ''})"
        expression.editor.replace(exponent, f"{first} - {largest}.clamp(min=0).detach()", before)


def subtractions(power: OpCall, ops: Sequence[OpCall]) -> Iterator[SubtractLargest]:
    """Yield the change for a power, if a run sums all powers along one dimension or in groups, and nowhere else.

    The largest of others would leave it 0. It has to be in one of the sums: a mask, whose least number is 0, may leave
    it out.
    """
    rank, followed, has_largest = len(power.outputs[0].shape), {power.order: True}, False
    sums, products = list[str](), list[str]()
    for op in (op for op in ops[power.order + 1 :] if op.phase != "backward"):
        taken = [followed[it.producer] for it in op.inputs if it.producer in followed]
        if not taken or op.op == "div":  # what is divided is a share
            continue
        if op.op in CASTS or op.op == "mul":
            factors = (it.stats for it in op.inputs if it.producer not in followed and it.stats is not None)
            followed[op.order] = all(taken) and all(stats.min != 0 for stats in factors)
        elif op.op in PRODUCTS and op.inputs[0].producer in followed:
            products.append(str(rank - 1))
        elif op.op in _SCATTERS or op.op in _SUMS:
            sums.append(_GROUPS if op.op in _SCATTERS else dims_of(op))
            has_largest |= all(taken)
        else:
            return
    if has_largest and len({_counted(dims, rank) for dims in (*sums, *products)}) == 1:
        yield SubtractLargest(site=site_of(power), along=sums[0])


def _check_reads(expression: Expression, ops: Sequence[OpCall]) -> None:
    """Raise CannotWriteError if powers, or what is made of them but their shares, are read where no traced op did."""
    editor, tree = expression.editor, expression.editor.tree
    forward = [op for op in ops if op.phase != "backward" and op.forward is None]
    nodes: dict[int, ast.AST] = {op.order: node for node, op in editor.calls(forward)}
    made_here = (order for order, node in nodes.items() if node is expression.node)
    # The exponents of the common factor: 0 for a share.
    degrees: dict[int | None, int] = {order: 1 for order in made_here if ops[order].op == expression.op_name}
    for op in forward:
        taken = {it.name: degree for it in op.inputs if (degree := degrees.get(it.producer, 0))}
        if taken:
            first, other = (taken.get(name, 0) for name in ("self", "other"))
            made = {"mul": first + other, "div": first - other, "reciprocal": -first}
            degrees[op.order] = made.get(op.op, max(taken.values()))
    waiting = list(dict.fromkeys(node for order, node in nodes.items() if degrees.get(order)))
    for node in waiting:  # it grows meanwhile
        match _statement_taking(node, {*nodes.values()}, tree):
            case ast.Assign(targets=[ast.Name(id=bound)]) as assignment:
                below, definitions = ast.walk(tree.function_of(node) or tree.module), Definitions(editor, node)
                names = (it for it in below if isinstance(it, ast.Name) and isinstance(it.ctx, ast.Load))
                read = [it for it in names if it.id == bound and definitions.assignment_of(it) in (None, assignment)]
                waiting += [name for name in read if name not in waiting]
            case ast.stmt():
                raise CannotWriteError


def _statement_taking(node: ast.AST, called: Set[ast.AST], tree: SourceTree) -> ast.stmt | None:
    """Return the statement that takes the value of an expression itself; None if a `called` op in it does."""
    was_run = node in called
    for above in () if isinstance(node, ast.AugAssign) else tree.ancestors(node):
        is_read = isinstance(above, ast.Attribute) and above.attr in _OF_SHAPE
        if is_read or above in called or (was_run and isinstance(above, ast.Expr)):  # written in place
            return None
        if isinstance(above, ast.stmt):
            return above
        if isinstance(above, NOT_IN_EACH_RUN) and not was_run:
            called = frozenset()
    return None


def _counted(dims: str, rank: int) -> str:
    """Return a dimension counted from the first one."""
    return str(int(dims) % rank) if dims.lstrip("-").isdigit() else dims


def _largest_of_groups(expression: Expression, logits: str, ops: Sequence[OpCall]) -> str:
    """Return the text of the largest exponent of each group of powers in a sum, for each of its members."""
    editor, place, power = expression.editor, expression.node, expression.op
    takers = descendants(ops, power.order, _STEPS) if power is not None else ()
    scatters, definitions = [op for op in takers if op.op in _SCATTERS], Definitions(editor, place)
    node, scatter = next(editor.calls(scatters[:1]), (None, None))
    if power is None or scatter is None or node is None or not definitions.has(node, editor):
        raise CannotWriteError
    added = Expression(editor, node, scatter)
    start, dim, index = (definitions.text_at(added.argument_node(name), place) for name in ("self", "dim", "index"))
    taken, given = power.inputs[0].stats, scatter.inputs[0].stats
    differs = taken is not None and given is not None and taken.dtype is not given.dtype  # as under autocast
    start = f"{grouped(start)}.to({logits}.dtype)" if differs else grouped(start)
    is_flat = len(scatter.outputs[0].shape) == 1  # then both do the same, and torch calls index_reduce a beta
    reduce, gather = _SCATTERS["scatter_add" if is_flat else scatter.op]
    largest = f'{start}.{reduce}({dim}, {index}, {logits}, "amax", include_self=False)'
    return f"{largest}.{gather}({dim}, {index})"
