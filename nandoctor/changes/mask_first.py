"""Lay the mask of an op's result over its argument already, where the op overflows or has an infinite gradient."""

from __future__ import annotations

import ast
from typing import Any, ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.places import in_place, place_of
from nandoctor.changes.running_op import RunningOp, is_tensor
from nandoctor.changes.source_tree import CannotWriteError, grouped
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.ops import DOMAINS
from nandoctor.text import constant

TRIANGLES = frozenset({"tril", "triu"})
"""Ops that are masks themselves: they put 0 on one side of the diagonal, which is a safe argument of an exponential."""


@kind_of_change
class MaskFirst(SingleEdit):
    """Run an op on `safe` where a later op of the same function discards its result, or what is made of it.

    That op, at `mask`, takes it as `masked`, "self" or "other": a `where` or `masked_fill`, a product with 0 and 1, or
    one of the `TRIANGLES`.
    """

    size: ClassVar[int] = 2
    why: ClassVar[str] = "What is masked only after the op is Inf until then, and 0 * Inf is NaN, in the gradient too."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["mask-first"] = "mask-first"
    site: OpSite
    argument: str
    safe: float
    mask: OpSite
    masked: str

    @property
    def title(self) -> str:
        safe, later = constant(self.safe), place_of(self.mask)
        return f"Give {self.site.op}{in_place(self.site)} the argument {safe} where {later} masks its result"

    def run(self, op: RunningOp) -> Any:
        """Run the op on `safe` where it or its derivative is infinite: a stand-in, to see what fails besides."""
        given, made, domain = op.argument(self.argument), op.run(), DOMAINS.get(self.site.op)
        if op.is_mutable or not is_tensor(given):
            return made
        inside = made.isfinite() if domain is None else (given > domain.low) & (given < domain.high)
        return op.run(**{self.argument: given.where(inside, self.safe)})

    def write(self, source: SourceWriter) -> None:
        expression, later = source.open(self.site), source.open(self.mask)
        editor, argument = expression.editor, expression.argument_node(self.argument)
        definitions = Definitions(editor, expression.node)
        if not definitions.has(later.node, later.editor):
            raise CannotWriteError
        if self.mask.op in TRIANGLES:
            if any(key in ("input", "self") for key, _ in later.arguments):
                raise CannotWriteError
            given = [(key, definitions.text_at(value, expression.node)) for key, value in later.arguments[1:]]
            texts = [f"{key}={text}" if key else text for key, text in given]
            editor.replace(argument, f"{editor.operand(argument)}.{self.mask.op}({', '.join(texts)})")
            return
        if self.mask.op == "mul":
            masking = later.argument_node("other" if self.masked == "self" else "self")
        elif isinstance(later.node, ast.Call) and later.node.args:  # a condition comes first
            masking = later.node.args[0]
        else:
            raise CannotWriteError
        mask = definitions.text_at(masking, expression.node)
        if editor.tree.code(expression.node) in mask:  # what is masked shows where
            raise CannotWriteError
        condition = f"{grouped(mask)} != 0" if self.mask.op == "mul" else mask
        kept, safe = editor.code(argument), self.safe
        drops = self.mask.op == "masked_fill" or (self.mask.op == "where" and self.masked == "other")
        chosen = f"{safe}, {kept}" if drops else f"{kept}, {safe}"
        editor.replace(argument, f"torch.where({condition}, {chosen})")
