"""Give an op a constant value, and no gradient, where its argument is at a singular point."""

from __future__ import annotations

import ast
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

from nandoctor.changes.expression import applied
from nandoctor.changes.places import in_place
from nandoctor.changes.running_op import RunningOp, is_tensor
from nandoctor.changes.source_tree import CannotWriteError, name_called
from nandoctor.changes.source_writer import SourceWriter, edges_kept_off
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.text import constant


@kind_of_change
class GuardArgument(SingleEdit):
    """Run an op on `safe` where its argument is not strictly between `low` and `high`; use `fill` as its result there.

    If neither bound is given, zeros are replaced. NaN is kept. The argument is made safe before the op and the result
    selected after it, so that no gradient passes through the point; why either one alone is not enough:
    https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where.
    """

    size: ClassVar[int] = 2
    why: ClassVar[str] = (
        "The argument is made safe before the op and its result selected after it: either one alone leaves NaN in the "
        "gradient."
    )

    kind: Literal["guard"] = "guard"
    site: OpSite
    argument: str
    safe: float
    low: float | None = None
    high: float | None = None
    fill: float = 0.0

    @property
    def title(self) -> str:
        ends = {"above": self.low, "below": self.high}
        bounds = [f"{side} {constant(end)}" for side, end in ends.items() if end is not None]
        where = f"is not {' and '.join(bounds)}" if bounds else "is 0"
        what = "divisor" if self.argument == "other" else "argument"
        return (
            f"Give {self.site.op} the value {self.fill:g} and no gradient where its {what} {where}{in_place(self.site)}"
        )

    @property
    def edges(self) -> tuple[float, ...]:
        return edges_kept_off(self.site.op, self.argument, self.low, self.high)

    def run(self, op: RunningOp) -> Any:
        given = op.argument(self.argument)
        if not is_tensor(given):
            return op.run()
        ends = [given <= self.low] if self.low is not None else []
        ends += [given >= self.high] if self.high is not None else []
        outside = reduce(or_, ends or [given == 0])
        made = op.run(**{self.argument: given.where(~outside, self.safe)})
        return made.masked_fill_(outside, self.fill) if op.is_mutable else made.where(~outside, self.fill)

    def works_in_place(self, *, has_out: bool) -> bool:
        """Return False for an op with `out=`: selecting from its result would make another tensor."""
        return not has_out

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        source.places[self] = {expression.node}
        argument = expression.argument_node(self.argument)
        if name_called(expression.node).endswith("_"):  # torch.where would make another tensor than the op writes to
            raise CannotWriteError
        text = source.moved(self, expression.editor.code(argument))
        if source.only_moves:
            expression.editor.replace(argument, text)
            return
        first, again, before = expression.editor.named(expression.node, text, "guarded")
        safe = f"torch.where({self._condition(again, again)}, {self.safe}, {again})"
        made, assigned = expression.editor.code(expression.node, {argument: safe}), ""
        if isinstance(expression.node, ast.AugAssign):
            target = expression.node.target
            assigned = f"{expression.editor.code(target)} = "
            made = applied(expression.node, expression.editor.operand(target), safe)
        text = f"{assigned}torch.where({self._condition(first, again)}, {self.fill}, {made})"
        expression.editor.replace(expression.node, text, before)

    def _condition(self, first: str, again: str) -> str:
        """Return the condition that an argument is outside the bounds, or 0: false for NaN, which has to stay."""
        ends = [(sign, end) for sign, end in (("<=", self.low), (">=", self.high)) if end is not None]
        pairs = zip((first, again), ends or [("==", 0.0)], strict=False)
        parts = [f"{text} {sign} {constant(end)}" for text, (sign, end) in pairs]
        return " | ".join(f"({part})" for part in parts) if len(parts) > 1 else parts[0]
