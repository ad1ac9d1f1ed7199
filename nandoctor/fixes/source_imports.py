"""Finds the names that a source file's import statements bind, and adds the import that a change needs."""

from __future__ import annotations

import libcst as cst
from libcst.helpers import get_full_name_for_node

_FOR_TYPE_CHECKERS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(module: cst.Module, *, everywhere: bool) -> set[str]:
    """Return the names that a file imports: `everywhere`, or only where every function can use them."""
    imports = _Imports(everywhere=everywhere)
    module.visit(imports)
    return imports.names


def with_torch(before: str, text: str) -> str:
    """Return a changed text with `import torch` at the first possible place, if only the change needs torch."""
    if "torch." not in text.replace(before, ""):
        return text
    module = cst.parse_module(text)
    place = next((i for i, item in enumerate(module.body) if not _must_come_first(item)), len(module.body))
    body = [*module.body[:place], cst.parse_statement("import torch\n"), *module.body[place:]]
    return module.with_changes(body=body).code


def _must_come_first(statement: cst.CSTNode) -> bool:
    """Return True for a docstring or an import from __future__."""
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()), *_]):
            return True
        case cst.SimpleStatementLine(body=[cst.ImportFrom(module=cst.Name("__future__")), *_]):
            return True
    return False


class _Imports(cst.CSTVisitor):
    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._everywhere = everywhere

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - libcst's own
        return self._everywhere

    def visit_If(self, node: cst.If) -> bool:  # noqa: N802
        is_name = isinstance(node.test, cst.Name | cst.Attribute)
        return self._everywhere or not (is_name and get_full_name_for_node(node.test) in _FOR_TYPE_CHECKERS)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:  # noqa: N802
        self.names.add((node.evaluated_alias or node.evaluated_name).partition(".")[0])
