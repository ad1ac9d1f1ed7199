"""Compute a variance from the distances to the mean, where rounding makes E[x^2] - E[x]^2 negative or 0."""

from __future__ import annotations

import ast
from typing import ClassVar, Literal

from nandoctor.changes.definitions import Definitions
from nandoctor.changes.expression import Expression, root_of
from nandoctor.changes.places import in_place
from nandoctor.changes.source_tree import CannotWriteError, grouped, name_called, names_in
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change


@kind_of_change
class StableVariance(SingleEdit):
    """Write the difference at a site, of the mean of squares and the square of the mean, as a call of `var`."""

    size: ClassVar[int] = 2
    why: ClassVar[str] = "The variance is no longer the small difference of two large numbers."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["stable-variance"] = "stable-variance"
    site: OpSite

    @property
    def title(self) -> str:
        return f"Compute the variance from the distances to the mean{in_place(self.site)}"

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        editor, node = expression.editor, expression.node
        definitions = Definitions(editor, node)
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
            raise CannotWriteError

        def mean_in(found: ast.expr | None) -> Expression:
            mean = definitions.resolved(found) if found is not None else None
            if mean is None or name_called(mean) != "mean":
                raise CannotWriteError
            return Expression(editor, mean, None, "mean")

        of_squares, of_values = mean_in(node.left), mean_in(root_of(definitions.resolved(node.right)))
        values = root_of(definitions.resolved(of_squares.argument_node("self")))
        dims = of_squares.texts_after_first()
        taken = [value and ast.dump(definitions.resolved(value)) for value in (values, of_values.argument_node("self"))]
        if values is None or taken[0] != taken[1] or dims != of_values.texts_after_first():
            raise CannotWriteError
        if any(definitions.is_bound_between(it, node) for it in (values, of_squares.node, of_values.node)):
            raise CannotWriteError
        dims[1:] = [text if "=" in text else f"keepdim={text}" for text in dims[1:]]
        text = editor.code(values)
        editor.replace(node, f"{grouped(text)}.var({', '.join([*dims, 'correction=0'])})")
        definitions.remove_unread([node], names_in(values))
