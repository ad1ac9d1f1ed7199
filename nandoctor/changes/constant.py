"""Change a constant: a number among an op's arguments, or a flag."""

from __future__ import annotations

import ast
import math
from typing import Any, ClassVar, Literal

from nandoctor.changes.expression import number_in
from nandoctor.changes.places import in_place, place_of
from nandoctor.changes.running_op import RunningOp
from nandoctor.changes.source_tree import CannotWriteError, name_called
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.evidence.formats import LARGEST_EPS
from nandoctor.text import constant


@kind_of_change
class SetArgument(SingleEdit):
    """Replace a number among an op's arguments, named as in the op's schema: the 1e-8 of `x + 1e-8`.

    Only an argument that `was` this number is replaced; a 0 is a divisor. A `value` of None stands for the lowest
    number of the op's format, `torch.finfo(x.dtype).min`.
    """

    is_inner: ClassVar[bool] = True

    kind: Literal["set-argument"] = "set-argument"
    site: OpSite
    argument: str
    was: float
    value: float | None

    @property
    def title(self) -> str:
        new = "the lowest number of its format" if self.value is None else constant(self.value)
        what = "an eps of " if self.value is not None and 0 < self.was <= LARGEST_EPS else ""
        return f"Use {what}{new} instead of {constant(self.was)} in {place_of(self.site) or self.site.op}"

    @property
    def replaces(self) -> str:
        """A quotient by the number 0, which nothing near it tends to."""
        return "a quotient by 0 has no value, and becomes its numerator" if self.was == 0 else ""

    def run(self, op: RunningOp) -> Any:
        was = op.number(self.argument)
        if was is None or not math.isclose(was, self.was, rel_tol=1e-6):
            return op.run()
        return op.run(**{self.argument: op.lowest() if self.value is None else self.value})

    def works_in_place(self, *, has_out: bool) -> bool:
        """Return True: the tensor that is written to stays the same."""
        return True

    def write(self, source: SourceWriter) -> None:
        """Replace the number, or pass it as the `eps` of a torch function that has it as its default."""
        expression = source.open(self.site)
        change = expression.editor
        constants = [value for _, value in expression.arguments if number_in(value) == self.was]
        source.places[self] = {expression.node}
        value = f"torch.finfo({expression.argument('self')}.dtype).min" if self.value is None else constant(self.value)
        default_eps = change.library.default_eps(name_called(expression.node))
        if not constants and default_eps == self.was:  # the op is inside a torch function
            change.replace(expression.node, expression.with_keyword("eps", value))
            return
        named = expression.argument_node(self.argument)
        if len(constants) == 1:
            change.replace(constants[0], value)
        elif not constants and self.was == 0:  # another batch may have another number
            change.replace(named, f"({expression.argument(self.argument)} or {value})")
        elif not constants and isinstance(named, ast.Name | ast.Attribute):
            is_raised = self.value is not None and self.value > self.was  # others may give a larger one
            change.replace(named, f"max({change.tree.code(named)}, {value})" if is_raised else value)
        else:
            raise CannotWriteError


@kind_of_change
class SetFlag(SingleEdit):
    """Pass True for an op's argument that is False by default: `zero_infinity` of a CTC loss."""

    kind: Literal["set-flag"] = "set-flag"
    site: OpSite
    argument: str

    @property
    def title(self) -> str:
        return f"Call {self.site.op} with {self.argument}=True{in_place(self.site)}"

    def run(self, op: RunningOp) -> Any:
        return op.run(**{self.argument: True})

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        expression.editor.replace(expression.node, expression.with_keyword(self.argument, "True"))
