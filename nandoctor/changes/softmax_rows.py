"""Give the fully masked rows of a softmax or an attention a result of zeros."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nandoctor.changes.running_op import RunningOp
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change

_ATTENTION = "scaled_dot_product_attention"


@kind_of_change
class UnmaskRows(SingleEdit):
    """Let a softmax or attention op attend evenly in rows where every key is masked, and return zeros for them."""

    why: ClassVar[str] = (
        "A softmax over nothing but -Inf has no value: these rows get equal weights, and the result is set to 0."
    )

    kind: Literal["unmask-rows"] = "unmask-rows"
    site: OpSite

    @property
    def title(self) -> str:
        return "Unmask the fully masked rows, and set their result to 0"

    def run(self, op: RunningOp) -> Any:
        closed = op.full_rows()
        if closed is None:
            return op.run()
        name = "attn_mask" if op.name == _ATTENTION else "self"
        given = op.argument(name)
        opened = given.masked_fill(closed, 0.0) if given.is_floating_point() else given | closed
        return op.run(**{name: opened}).masked_fill(closed, 0.0)

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        change = expression.editor
        if self.site.op == _ATTENTION:
            mask = expression.argument_node("attn_mask")
            text = change.operand(mask)
            empty = f"~{text}.any(-1, keepdim=True)"
            whole = change.code(expression.node, {mask: f"{text} | {empty}"})
            change.replace(expression.node, f"{whole}.masked_fill({empty}, 0.0)")
            return
        node = expression.argument_node("self")
        first, scores, before = change.named(node, change.code(node), "logits")
        name = change.new_name("empty", expression.node)
        rows = f"{name} = torch.isneginf({first}).all({expression.argument('dim')}, keepdim=True)"
        opened = change.code(expression.node, {node: f"{scores}.masked_fill({name}, 0.0)"})
        change.replace(expression.node, f"{opened}.masked_fill({name}, 0.0)", (*before, rows))
