"""Keep an op's value where its argument is 0, and let no gradient pass there."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nandoctor.changes.places import dims_of, in_place
from nandoctor.changes.running_op import RunningOp
from nandoctor.changes.source_tree import CannotWriteError, as_part
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change


@kind_of_change
class HoldAtZero(SingleEdit):
    """Keep an op's own value where its argument is 0, and let no gradient pass there.

    Of an op that reduces dimensions, that is where all are 0 that one result is made of.
    """

    size: ClassVar[int] = 2
    why: ClassVar[str] = (
        "A derivative that the code differentiates again is singular itself at 0: the value stays, and the op is given "
        "1 there, so that nothing infinite is multiplied by 0."
    )

    kind: Literal["hold-at-zero"] = "hold-at-zero"
    site: OpSite
    argument: str

    @property
    def title(self) -> str:
        """The op and its line."""
        return f"Let no gradient pass {self.site.op} where its argument is 0{in_place(self.site)}"

    def run(self, op: RunningOp) -> Any:
        """Run the op as it is for its value, and on 1 where its argument is 0."""
        given, kept = op.argument(self.argument), op.run().detach()
        zero, dim = given == 0, op.argument("dim")
        if kept.shape != given.shape:
            zero = zero.all() if dim is None else zero.all(dim, keepdim=True)
        made = op.run(**{self.argument: given.masked_fill(zero, 1.0)})
        return kept.where(zero.reshape(kept.shape), made)

    def write(self, source: SourceWriter) -> None:
        """Write the same with `torch.where`."""
        expression = source.open(self.site)
        editor, node, argument = expression.editor, expression.node, expression.argument_node(self.argument)
        first, again, before = editor.named(node, editor.code(argument), "given")
        if first != again or expression.op is None:  # the mask needs a statement of its own
            raise CannotWriteError
        taken, made_shape = expression.op.inputs[0].stats, expression.op.outputs[0].shape
        shape = taken.shape if taken is not None else made_shape
        dims, mask = dims_of(expression.op), f"{as_part(first)} == 0"
        if shape != made_shape:
            mask = f"({mask}).all({f'{dims}, keepdim=True' if dims else ''})"
        zero, name, statement = editor.named(node, mask, "zero")
        if zero != name:
            raise CannotWriteError
        kept = f"{as_part(editor.code(node, {argument: first}))}.detach()"
        made = editor.code(node, {argument: f"torch.where({zero}, 1.0, {first})"})
        chosen = f"{zero}.squeeze({dims})" if dims and len(shape) > len(made_shape) else zero
        editor.replace(node, f"torch.where({chosen}, {kept}, {made})", (*before, *statement))
