"""Scale before a product instead of after it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from nandoctor.changes.places import in_place
from nandoctor.changes.running_op import RunningOp
from nandoctor.changes.source_tree import CannotWriteError
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change


@kind_of_change
class ScaleFirst(SingleEdit):
    """Scale before a product instead of after it: `product` gets its first tensor times `factor`, `scale` is removed.

    `scale` is the multiplication or division by a number that followed.
    """

    size: ClassVar[int] = 2
    why: ClassVar[str] = "The product is the same, and no intermediate result is larger than it."

    kind: Literal["scale-first"] = "scale-first"
    product: OpSite
    scale: OpSite
    factor: float

    @property
    def title(self) -> str:
        """The factor and the product."""
        return f"Scale by {self.factor:.4g} before {self.product.op}{in_place(self.product)} instead of after it"

    @property
    def sites(self) -> tuple[OpSite, ...]:
        """The product and the scaling."""
        return self.product, self.scale

    def on_ops(self) -> Iterator[tuple[OpSite, Callable[[RunningOp], Any]]]:
        """Scale the first tensor of the product, and pass the scaling's on."""
        yield self.product, self._run_scaled
        yield self.scale, lambda op: op.tensors()[0][1]

    def _run_scaled(self, op: RunningOp) -> Any:
        name, tensor = op.tensors()[0]
        return op.run(**{name: tensor * self.factor})

    def write(self, source: SourceWriter) -> None:
        """Move the factor as it is written from the scaling to the product's first operand."""
        scale, product = source.open(self.scale), source.open(self.product)
        change = scale.editor
        if product.editor is not change or change.tree.scope_of(product.node) is not change.tree.scope_of(scale.node):
            raise CannotWriteError  # names mean something else in another function
        if not isinstance(scale.node, ast.BinOp):
            raise CannotWriteError
        first, factor = product.argument_node("self"), scale.argument("other")
        operator = "/" if isinstance(scale.node.op, ast.Div) else "*"
        scaled = f"{product.editor.operand(first)} {operator} {factor}"
        if product.node is scale.node.left or scale.node.left in change.tree.ancestors(product.node):
            change.replace(scale.node, change.code(scale.node.left, {first: f"({scaled})"}))
            return
        change.replace(first, scaled)
        change.replace(scale.node, change.code(scale.node.left))
