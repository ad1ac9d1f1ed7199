"""Subtract the largest exponent of those that only shares are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.expression import Expression
from nandoctor.changes.places import descendants, dims_of, in_place, site_of
from nandoctor.changes.source_tree import CannotWriteError, grouped
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.trace import OpCall

_GROUPS = "groups"
_STEPS = 8
_SUMS = frozenset({"sum", "mean", "cumsum"})
_SCATTERS = {"index_add": ("index_reduce", "index_select"), "scatter_add": ("scatter_reduce", "gather")}
"""Sums into groups, with what takes the maximum of each group, and what gives it back to its members."""


@kind_of_change
class SubtractLargest(SingleEdit):
    """Subtract the largest exponent before an exponential: all powers get a common factor, and their shares stay.

    `along` are the dimensions that have a largest exponent, as code; "" stands for all, "groups" for the groups into
    which powers are summed by an index. Whether the step makes shares alone is not looked for: a run has to show it.
    """

    why: ClassVar[str] = "A common factor of all powers cancels in their shares; now the largest power is 1."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["subtract-largest"] = "subtract-largest"
    site: OpSite
    along: str

    @property
    def title(self) -> str:
        """The op and its line."""
        return f"Subtract the largest exponent before {self.site.op}{in_place(self.site)}"

    def write(self, source: SourceWriter) -> None:
        """Write the difference as the argument of the exponential."""
        expression = source.open(self.site)
        if expression.op is None:
            raise CannotWriteError
        exponent, takers = expression.argument_node("self"), [*descendants(source.ops, expression.op.order, _STEPS)]
        first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
        if self.along == _GROUPS:
            largest = _largest_of_groups(expression, next(op for op in takers if op.op in _SCATTERS), again)
        else:
            largest = f"{again}.amax({f'{self.along}, keepdim=True' if self.along else ''})"
        if any(op.op == "add" and dict(op.scalars).get("other") for op in takers):
            largest = f"{largest}.clamp(min=0)"  # beside an eps nothing is added to small exponents
        expression.editor.replace(exponent, f"{first} - {largest}.detach()", before)


def subtractions(power: OpCall, ops: Sequence[OpCall]) -> Iterator[SubtractLargest]:
    """Yield the changes for a power, the smallest groups first: the largest of many would leave others nothing but 0.

    These are those of its sums, then each sample, then all.
    """
    takers, rank = [*descendants(ops, power.order, _STEPS)], len(power.outputs[0].shape)
    groups = [_GROUPS for op in takers if op.op in _SCATTERS]
    summed = [dims for op in takers if op.op in _SUMS and (dims := dims_of(op))]
    inner = [str(dim) for dim in range(1, rank)]
    each = [f"({', '.join(inner)})" if len(inner) > 1 else inner[0]] if inner else []
    for along in dict.fromkeys((*groups, *summed, *each, "")):
        yield SubtractLargest(site=site_of(power), along=along)


def _largest_of_groups(expression: Expression, scatter: OpCall, logits: str) -> str:
    """Return the text of the largest exponent of each group of a `scatter`, for each of its members."""
    editor, place = expression.editor, expression.node
    node, definitions = editor.find(scatter.source) if scatter.source else None, Definitions(editor, place)
    if node is None or not definitions.has(node, editor):
        raise CannotWriteError
    added = Expression(editor, node, scatter)
    start, dim, index = (definitions.text_at(added.argument_node(name), place) for name in ("self", "dim", "index"))
    taken, given = (op.inputs[0].stats if op is not None else None for op in (expression.op, scatter))
    differs = taken is not None and given is not None and taken.dtype is not given.dtype  # as under autocast
    start = f"{grouped(start)}.to({logits}.dtype)" if differs else grouped(start)
    is_flat = len(scatter.outputs[0].shape) == 1  # then both do the same, and torch calls index_reduce a beta
    reduce, gather = _SCATTERS["scatter_add" if is_flat else scatter.op]
    largest = f'{start}.{reduce}({dim}, {index}, {logits}, "amax", include_self=False)'
    return f"{largest}.{gather}({dim}, {index})"
