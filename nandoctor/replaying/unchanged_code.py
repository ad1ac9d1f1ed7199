"""Finds the code as it was when the step failed, where it can be run beside the code as it is now.

In: what is known to have changed. Out: a `SourcePatch` from the one to the other, or None.

Only bodies of functions can be taken back in a model that is built already: not what ran when it was imported or built.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nandoctor.dumps.dump import Dump
from nandoctor.evidence.changes import ChangedFile, SourcePatch
from nandoctor.evidence.verification import CodeState
from nandoctor.replaying.code_changes import recorded_hashes
from nandoctor.replaying.git_history import text_at, text_with_hash

_BUILD = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"})


def find_unchanged(dump: Dump, code: CodeState, told: Mapping[Path, str | None]) -> SourcePatch | None:
    """The patch that made the changes in `code`; `told` has the texts of before that the caller knows.

    The project that the code belongs to is open. None where nothing has changed, or one of the files as it was is not
    known or cannot be run.
    """
    files = []
    for change in code.changes:
        path = Path(change.file).resolve()
        try:
            before = told.get(path) or _find_text(dump, change.file, path)
            after = path.read_bytes().decode("utf-8")
        except (OSError, ValueError):
            return None
        if before is None or not _can_be_undone(before, after):
            return None
        if before != after:
            files.append(ChangedFile(path=_as_imported(path), before=before, after=after))
    return SourcePatch(root=str(Path.cwd()), files=tuple(files)) if files else None


def _find_text(dump: Dump, name: str, path: Path) -> str | None:
    """The text in git that has the recorded hash; of a file without one, that of when the dump was written.

    It will be run: a branch that was fetched from somebody else is not looked into, nor is a stranger's dump followed.
    """
    known = recorded_hashes(dump.recorded).get(name) if dump.provenance.own else None
    if known is None:
        text = text_at(path, dump.path.stat().st_mtime_ns, any_branch=False)
    else:
        text = text_with_hash(path, known.sha256)
    return text.decode("utf-8") if text is not None else None


def _as_imported(path: Path) -> str:
    """The file by the name that its functions have it, which may go through a link."""
    names = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    same = (name for name in names if name.endswith(path.name) and Path(name).resolve() == path)
    return next(same, str(path))


def _can_be_undone(before: str, after: str) -> bool:
    """Tell whether two texts differ in nothing but imports and in bodies of functions that run after the building."""
    try:
        skeletons = [ast.dump(_Skeleton().visit(ast.parse(text))) for text in (before, after)]
    except (SyntaxError, ValueError, RecursionError):
        return False
    return skeletons[0] == skeletons[1]


class _Skeleton(ast.NodeTransformer):
    """Leaves out imports and the bodies of functions, but for those that build a model."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name in _BUILD else self._emptied(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def _emptied(self, node: Any) -> ast.AST:
        node.body = [ast.Pass()]
        return node  # type: ignore[no-any-return]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        return None

    visit_ImportFrom = visit_Import  # noqa: N815
