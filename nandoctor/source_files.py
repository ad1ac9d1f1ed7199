"""Source files: which are the project's own, what they are called, and by their hashes what has changed in them.

The hashes of single lines are short: they tell where a file changed, and nobody can read the code in them.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

_LINE_NBYTES = 4
_LINE_DIGITS = 2 * _LINE_NBYTES
_MAX_HASHED_NBYTES = 1 << 20
_MAX_OWN_NBYTES = 16 << 20
_MAX_LINES = 10_000

ASSIGNED: tuple[type[ast.stmt], ...] = (ast.Assign, ast.AnnAssign)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHash:
    """The sha256 of a file, and eight hexadecimal digits for each of its lines; "" where those are not known."""

    sha256: str
    lines: str = ""


@lru_cache(maxsize=16)
def parse(text: str) -> ast.Module | None:
    """The syntax tree of a file's text, shared by all who ask and not to be changed; None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own invalid escapes are not the reader's matter
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defines(path: Path, name: str, kinds: tuple[type[ast.stmt], ...]) -> bool:
    """Tell from the source whether the file defines that name, the last part of it by a statement of these kinds."""
    tree = _try_to_parse(path)
    body: list[ast.stmt] = tree.body if tree is not None else []
    *outer, last = name.split(".")
    for part in outer:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    return any(isinstance(node, kinds) and last in _names_of(node) for node in body)


def binds_at_top_level(path: Path, name: str) -> bool:
    """Tell whether the file binds the name by statements at its top level alone, so that each import gives the same.

    Below `if __name__ == "__main__":`, or by a function that calls it global, it would have another value in the script
    than where the file is imported.
    """
    tree = _try_to_parse(path)
    if tree is None or any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(tree)):
        return False
    bound = [node for node in _walk_scope(tree) if isinstance(node, ast.stmt) and name in _names_of(node)]
    return all(node in tree.body for node in bound)


def _walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _walk_scope(child)


def _parse_file(path: Path) -> ast.Module | None:
    """Raises OSError, SyntaxError or UnicodeDecodeError where the file cannot be read."""
    return parse(decode_source(path.read_bytes())[0].removeprefix("\ufeff"))


def _try_to_parse(path: Path) -> ast.Module | None:
    try:
        return _parse_file(path)
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None


def _names_of(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return [str(getattr(target, "id", getattr(target, "name", ""))) for target in targets]


def is_interactive() -> bool:
    """Tell whether this is a notebook or a console, which goes on after its errors."""
    return hasattr(sys, "ps1")


def find_typed(module: str, name: str) -> Any:
    """What this notebook or console defines under that name, in no file; None elsewhere."""
    return getattr(sys.modules["__main__"], name, None) if module == "__main__" and is_interactive() else None


def decode_source(data: bytes) -> tuple[str, str]:
    """The text of a source file, a byte order mark and its line endings included, and the encoding that it declares.

    Raises SyntaxError or UnicodeDecodeError where Python could not read it.
    """
    encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0].replace("utf-8-sig", "utf-8")
    return data.decode(encoding), encoding


def package_of(path: Path) -> tuple[Path, str] | None:
    """The folder that holds the package of a file, and the file's name in it; None where it imports nothing relatively.

    Raises OSError, SyntaxError or UnicodeDecodeError where the file cannot be read.
    """
    tree = _parse_file(path)
    statements = tree.body if tree is not None else []
    num_up = max((statement.level for statement in statements if isinstance(statement, ast.ImportFrom)), default=0)
    if not 0 < num_up < len(path.parents):
        return None
    root = next(folder for folder in path.parents[num_up:] if not (folder / "__init__.py").is_file())
    return root, ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def is_installed(path: Path) -> bool:
    """Tell whether a file is of Python or of an installed package."""
    return path.is_relative_to(_STDLIB) or not PACKAGE_FOLDERS.isdisjoint(path.parts)


def holds_packages(folder: Path) -> bool:
    """Tell whether packages are installed into a folder: a virtual environment, or the one of its packages."""
    return folder.name in PACKAGE_FOLDERS or (folder / "pyvenv.cfg").is_file()


def shown_path(path: Path) -> str:
    """The path as a person reads it: relative to the working directory where it lies inside."""
    path, here = path.resolve(), Path.cwd().resolve()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def own_source(file: str) -> Path | None:
    """The source file of the project in the working directory that has this relative path; None where there is none.

    What was installed into a folder of the project, such as a virtual environment, is not of the project.
    """
    here = Path.cwd().resolve()
    if not file:
        return None
    try:
        path = (here / file).resolve()
        inside = path.is_relative_to(here) and path.suffix == ".py" and path.is_file() and os.access(path, os.R_OK)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long or no name
        return None
    folders = [folder for folder in path.parents if folder.is_relative_to(here)]
    installed = any(map(holds_packages, folders))
    return path if inside and not installed and path.stat().st_size <= _MAX_OWN_NBYTES else None


def hash_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_source(path: Path, *, lines: bool = True) -> SourceHash | None:
    """The hashes of a file; None where it cannot be read, or is too large to be code that somebody wrote."""
    try:
        if path.stat().st_size > _MAX_HASHED_NBYTES:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    each = data.splitlines() if lines else []
    digits = "".join([hashlib.blake2b(line, digest_size=_LINE_NBYTES).hexdigest() for line in each])
    return SourceHash(sha256=hashlib.sha256(data).hexdigest(), lines=digits)


def changed_lines(was: SourceHash, path: Path) -> tuple[int, int] | None:
    """The first line of the file that is not as it was, from 1, and how many differ; None where that is not known."""
    now = hash_source(path)
    if now is None or not was.lines or max(len(was.lines), len(now.lines)) > _MAX_LINES * _LINE_DIGITS:
        return None
    return count_changes(_split_digits(was.lines), _split_digits(now.lines))


def count_changes(before: Sequence[str], after: Sequence[str]) -> tuple[int, int] | None:
    """The first line of `after` that differs, from 1, and how many lines do; None where none does.

    A line that was taken out counts for one that was put in, wherever. The time is linear: the lines may be a
    stranger's, made so that a search for the shortest difference takes minutes.
    """
    if before == after:
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    removed, added = Counter(before) - Counter(after), Counter(after) - Counter(before)
    return same + 1, max(removed.total(), added.total(), 1)


def _split_digits(lines: str) -> list[str]:
    return [lines[place : place + _LINE_DIGITS] for place in range(0, len(lines), _LINE_DIGITS)]
