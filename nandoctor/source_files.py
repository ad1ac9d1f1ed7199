"""Find the project's own source files and their package names, and tell by hashes whether their code has changed."""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import re
import stat
import sys
import sysconfig
import tokenize
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_MAX_HASHED_NBYTES = 1 << 20
_MAX_OWN_NBYTES = 16 << 20

PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


_COMMENT = re.compile(rb"""((?:[^"'#]|"[^"]*"|'[^']*')*)#""")
"""A comment, and the code before it in its line: no string that begins there is still open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHash:
    """The sha256 of a file, and that of its `code` alone, "" if unknown."""

    sha256: str
    code: str = ""


@lru_cache(maxsize=16)
def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a file's text, None if it is not Python; the tree is cached, so do not modify it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as the file's own invalid escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defines_code(path: Path, name: str, *, own: bool, assigned: bool = False) -> bool:
    """Return True if the source defines a class of that name or, if it is the user's own, a function at its top level.

    That is what a replay imports for a dump; what is `assigned` at the top level it takes if the user names it.
    """
    body: list[ast.stmt] = getattr(parse_source(path), "body", [])
    *outer, last = name.split(".")
    for part in outer:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    kinds: tuple[type[ast.stmt], ...] = (ast.ClassDef,)
    if own and not outer:
        kinds = (*kinds, ast.FunctionDef, *((ast.Assign, ast.AnnAssign) if assigned else ()))
    return any(isinstance(node, kinds) and last in _names_of(node) for node in body)


def parse_source(path: Path) -> ast.Module | None:
    """Parse a file as `parse` does; return None if it cannot be read either."""
    try:
        return parse(decode_source(read_regular(path))[0].removeprefix("\ufeff"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return None


def read_regular(path: Path, most: int = _MAX_OWN_NBYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes; raise OSError for any other, as it may not end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        raise OSError(errno.EINVAL, "it is no regular file, or too large")
    return path.read_bytes()


def _names_of(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return [str(getattr(target, "id", getattr(target, "name", ""))) for target in targets]


def is_interactive() -> bool:
    """Return True in a notebook or console, which continues after errors."""
    return hasattr(sys, "ps1")


def find_typed(module: str, name: str) -> Any:
    """Return what this notebook or console itself defines under that name; None elsewhere."""
    return getattr(sys.modules["__main__"], name, None) if module == "__main__" and is_interactive() else None


def decode_source(data: bytes) -> tuple[str, str]:
    """Return the text of a source file, including a byte order mark and its line endings, and its declared encoding.

    Raise SyntaxError or UnicodeDecodeError if Python could not read it.
    """
    encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0].replace("utf-8-sig", "utf-8")
    return data.decode(encoding), encoding


def package_of(path: Path) -> tuple[Path, str] | None:
    """Return the parent folder of a file's package, and the file's dotted name; None without relative imports."""
    tree = parse_source(path)
    statements = tree.body if tree is not None else []
    num_up = max((statement.level for statement in statements if isinstance(statement, ast.ImportFrom)), default=0)
    if not 0 < num_up < len(path.parents):
        return None
    root = next(folder for folder in path.parents[num_up:] if not (folder / "__init__.py").is_file())
    return root, ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def is_installed(path: Path) -> bool:
    """Return True if a file belongs to Python itself or to an installed package."""
    return path.is_relative_to(_STDLIB) or not PACKAGE_FOLDERS.isdisjoint(path.parts)


def installed_path(module: str) -> Path | None:
    """Return the source file of an installed distribution's module, found without importing its packages.

    Return None if an import would find another module of that name, such as one in the working directory.
    """
    top, *parts = module.split(".")
    if not all(part.isidentifier() for part in [top, *parts]):
        return None
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    found = importlib.machinery.PathFinder.find_spec(top, elsewhere)
    if found is None or found.origin is None or _origin_of(top) != Path(found.origin).resolve():
        return None
    from importlib.metadata import packages_distributions  # noqa: PLC0415 - takes as long to import as all else here

    # Checked last: it reads the metadata of every installed distribution, which takes a second.
    if top not in packages_distributions():
        return None
    base = Path(found.origin).parent.joinpath(*parts)
    places = (base.with_suffix(".py"), base / "__init__.py") if parts else (Path(found.origin),)
    return next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113  (names may be too long)


def _origin_of(top: str) -> Path | None:
    """Return the file that an import of a top-level module runs, or has run; None if there is none."""
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module without a spec, such as one that a program has made
        return None
    return Path(found.origin).resolve() if found is not None and found.has_location and found.origin else None


def own_source(file: str) -> Path | None:
    """Return the project's source file with this path relative to the working directory; None if there is none.

    Packages installed in a folder of the project, such as a virtual environment, do not belong to the project.
    """
    here = Path.cwd().resolve()
    if not file:
        return None
    try:
        path = (here / file).resolve()
        inside = path.is_relative_to(here) and path.suffix == ".py" and path.is_file() and os.access(path, os.R_OK)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long or invalid
        return None
    folders = [folder for folder in path.parents if folder.is_relative_to(here)]
    installed = any(folder.name in PACKAGE_FOLDERS or (folder / "pyvenv.cfg").is_file() for folder in folders)
    return path if inside and not installed and path.stat().st_size <= _MAX_OWN_NBYTES else None


def hash_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal; raise OSError if it cannot be read."""
    return hashlib.sha256(read_regular(path)).hexdigest()


def hash_source(path: Path) -> SourceHash | None:
    """Return the hashes of a file; None if it cannot be read, or is too large to be hand-written code."""
    try:
        data = read_regular(path, _MAX_HASHED_NBYTES)
    except OSError:
        return None
    return SourceHash(sha256=hashlib.sha256(data).hexdigest(), code=hash_code(data))


def is_changed(was: SourceHash, path: Path) -> bool:
    """Return True if the code of a file is another: changed comments and blank lines do not count, if that is known."""
    now = hash_source(path)
    return now is None or (now.sha256 != was.sha256 and now.code != was.code)


def hash_code(data: bytes) -> str:
    """Return the sha256 of Python code without comments, trailing blanks and blank lines.

    In a string of several lines, what looks like a comment is left out too: a change there is not seen.
    """
    found = ((_COMMENT.match(line), line) for line in data.splitlines())
    lines = ((comment[1] if comment else line).rstrip() for comment, line in found)
    return hashlib.sha256(b"\n".join(filter(None, lines))).hexdigest()
