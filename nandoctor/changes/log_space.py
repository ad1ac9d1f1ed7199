"""Rewrite a logarithm or a quotient in log space; subtract the largest of exponents that only shares are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.expression import Expression
from nandoctor.changes.places import dims_of, in_place, place_of
from nandoctor.changes.source_tree import CannotWriteError, grouped
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.changes.stable_logs import LogSpace
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import CASTS, DIVISIONS, MOVES, PRODUCTS, is_factor


@kind_of_change
class StableLog(SingleEdit):
    """Rewrite a logarithm or quotient at a site without its exponential or probability.

    log(softmax) becomes log_softmax, log(sum(exp)) logsumexp, exp / sum(exp) softmax. The engine cannot apply it to a
    run, so it is tried as text. At an exponential it subtracts the largest exponent, which leaves the shares in a sum
    unchanged.
    """

    why: ClassVar[str] = "The result is computed without the number that rounds to 0 or overflows."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["stable-log"] = "stable-log"
    site: OpSite

    @property
    def title(self) -> str:
        """What is computed in log space, and where."""
        site = self.site
        if site.op == "exp":
            return f"Subtract the largest exponent before exp{in_place(site)}"
        what = "the quotient" if site.op in DIVISIONS else "the logarithm"
        return f"Compute {what} in {place_of(site) or site.op} in log space"

    def write(self, source: SourceWriter) -> None:
        """Write the stable form."""
        expression = source.open(self.site)
        if self.site.op == "exp":
            subtract_largest(expression, source.ops)
            return
        space = LogSpace(expression.editor, expression.node, source.ops)
        if self.site.op in DIVISIONS:
            space.write_ratio(expression.node)
        else:
            space.write_logs(expression.node)


_ELEMENTWISE = CASTS | {"clone", "contiguous", "mul", "div"}
_SUMS = frozenset({"sum", "mean", "cumsum"})
_SCATTERS = {"index_add": ("index_reduce", "index_select"), "scatter_add": ("scatter_reduce", "gather")}
"""Sums into groups, with what takes the maximum of each group, and what gives it back to its members."""
_LARGEST_EPS = 1e-5
_ADDS = _SUMS | {"add", "sub"} | _SCATTERS.keys()


def subtract_largest(expression: Expression, ops: Sequence[OpCall]) -> None:
    """Subtract the largest exponent along the dimensions or of the group that the powers are summed over, else of all.

    Raises:
        CannotWriteError: the run with these `ops` makes something of the powers that changes with their factor.
    """
    site = expression.op.source if expression.op is not None else None
    powers = [op for op in ops if op.op == expression.op_name and op.source == site]
    followed = [_follow(op, ops) for op in powers]
    if not followed:
        raise CannotWriteError
    orders = {order for degrees, _ in followed for order in degrees}
    has_eps = any(op.order in orders and op.op == "add" and dict(op.scalars).get("other") for op in ops)
    sums = [made for _, sums_of_op in followed for made in sums_of_op]
    dims = {dims_of(op) for op in sums}
    along = f"{dims.pop()}, keepdim=True" if len(dims) == 1 and "" not in dims else ""
    exponent = expression.argument_node("self")
    first, again, before = expression.editor.named(exponent, expression.editor.code(exponent), "logits")
    scatter = next((op for op in sums if op.op in _SCATTERS), None)
    largest = f"{again}.amax({along})" if scatter is None else _largest_of_groups(expression, scatter, again)
    if has_eps and not along and scatter is None:
        raise CannotWriteError  # the largest of all would leave other sums below the eps
    # Beside an eps nothing is added to small exponents, so that a row of -inf still has shares of 0.
    largest = f"{largest}.clamp(min=0)" if has_eps else largest
    expression.editor.replace(exponent, f"{first} - {largest}.detach()", before)


def _largest_of_groups(expression: Expression, scatter: OpCall, logits: str) -> str:
    """Return the text of the largest exponent of each group of a `scatter`, for each of its members."""
    editor, place = expression.editor, expression.node
    node, definitions = editor.find(scatter.source) if scatter.source else None, Definitions(editor, place)
    if node is None or not definitions.has(node, editor):
        raise CannotWriteError
    added = Expression(editor, node, scatter)
    start, dim, index = (definitions.text_at(added.argument_node(name), place) for name in ("self", "dim", "index"))
    start = f"{grouped(start)}.to({logits}.dtype)" if _differ_in_format(expression.op, scatter) else grouped(start)
    is_flat = len(scatter.outputs[0].shape) == 1  # then both do the same, and torch calls index_reduce a beta
    reduce, gather = _SCATTERS["scatter_add" if is_flat else scatter.op]
    largest = f'{start}.{reduce}({dim}, {index}, {logits}, "amax", include_self=False)'
    return f"{largest}.{gather}({dim}, {index})"


def _differ_in_format(power: OpCall | None, scatter: OpCall) -> bool:
    """Return True if the exponents have another format than what the powers are added to, as under autocast."""
    taken = power.inputs[0].stats if power is not None else None
    start = scatter.inputs[0].stats
    return taken is not None and start is not None and taken.dtype is not start.dtype


def _follow(power: OpCall, ops: Sequence[OpCall]) -> tuple[Mapping[int | None, int], list[OpCall]]:
    """Return how often what is made of an op's powers has their common factor, and the sums of the powers.

    What does not have it is left out. Before a sum, powers are at most multiplied.

    Raises:
        CannotWriteError: what is mixed with something else, or is there in the end, has the factor.
    """
    degrees: dict[int | None, int] = {power.order: 1}
    left, plain, scaled, behind_sums = {power.order}, {power.order}, {power.order}, set[int | None]()
    sums = list[OpCall]()
    for op in (op for op in ops if op.phase != "backward"):
        taken = [tensor for tensor in op.inputs if tensor.producer in degrees]
        producers = {tensor.producer for tensor in taken}
        known = {tensor.name: degrees[tensor.producer] for tensor in taken}
        degree = _degree_of(op, known, is_sum=producers <= behind_sums) if taken else 0
        if producers <= plain and _keeps_size(op):
            plain.add(op.order)
        if (producers <= plain and op.op == "sum") or (producers <= behind_sums and op.op in MOVES | CASTS | {"add"}):
            behind_sums.add(op.order)
        left -= {tensor.producer for tensor in taken if tensor.producer is not None}
        if degree:
            degrees[op.order] = degree
            left.add(op.order)
        summed = op.inputs[-1:] if op.op in _SCATTERS else op.inputs[:1]
        if any(tensor.producer in scaled for tensor in summed):
            if op.op in _ELEMENTWISE and degree:
                scaled.add(op.order)
            elif op.op in _SUMS or op.op in _SCATTERS:
                sums.append(op)
    if left:
        raise CannotWriteError
    return degrees, sums


def _keeps_size(op: OpCall) -> bool:
    """Return True if an op only moves or casts powers, or masks them."""
    factors = (tensor.stats for tensor in op.inputs if tensor.name == "other")
    is_mask = op.op == "mul" and all(stats is None or (stats.min, stats.max) in ((0, 1), (1, 1)) for stats in factors)
    return op.op in MOVES | CASTS or is_mask


def _degree_of(op: OpCall, taken: dict[str, int], *, is_sum: bool) -> int:
    """Return how often a result has the factor that inputs have so often, by their names; raise if it mixes them.

    With `is_sum` the inputs are sums of the powers: an eps that is added to them is nothing once a term is 1.
    """
    if op.op == "div":
        return sum(-degree if name == "other" else degree for name, degree in taken.items())
    if op.op == "mul" or (op.op in PRODUCTS and all(is_factor(op.op, tensor.name) for tensor in op.inputs)):
        return sum(taken.values())
    others = (tensor.stats.absmax for tensor in op.inputs if tensor.stats is not None and tensor.name not in taken)
    added = dict(op.scalars).get("other", 0.0)
    is_eps = added == 0 or (is_sum and op.op == "add" and 0 < added <= _LARGEST_EPS)
    is_alike = len(set(taken.values())) == 1 and not any(others) and is_eps
    if not is_alike or op.op not in MOVES | CASTS | _ADDS:
        raise CannotWriteError
    return next(iter(taken.values()))
