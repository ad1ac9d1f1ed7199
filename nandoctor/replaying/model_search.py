"""Find code near a dump that may build its model: classes that assign the names of its weights.

Files are parsed as text; none of their code is run.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.dump import Dump
from nandoctor.errors import ModelError
from nandoctor.source_files import decode_source, holds_packages, parse, shown_path

_MAX_FILES = 500
_MAX_NBYTES = 1 << 20
_MAX_SUGGESTED = 3
_REGISTERING = frozenset({"add_module", "register_module", "register_buffer", "register_parameter", "setattr"})


def missing_model(dump: Dump) -> ModelError:
    """Return the error for a dump without its model's code when no `--model` is given."""
    remedy = (
        "Name what builds the model: --model train.py:make_model, or model=make_model in Python; or set model in "
        "[tool.nandoctor] of the project's pyproject.toml."
    )
    if near := suggest_models(dump.state, (Path.cwd(), dump.path.parent)):
        remedy += f"\nJudging by the names of the weights, it may be --model {' or --model '.join(near)}."
    return ModelError("The dump holds weights and arrays, not the model's code.", remedy=remedy)


def suggest_models(names: Collection[str], folders: Collection[Path]) -> list[str]:
    """Return candidates for `--model`, "train.py:UNet": classes that assign the first parts of all `names`.

    `names` are those of a state dict. The files in `folders`, and in the folders directly inside of them, are read.
    """
    parts = [unwrapped_name(name).split(".") for name in names]
    wanted = [{first for first, *_ in parts}]
    if len(wanted[0]) == 1:  # a wrapper's prefix, such as Lightning's `model.`
        wanted.append({part[1] for part in parts if len(part) > 1})
    found = []
    for path in _find_sources(folders):
        text = _read(path)
        if any(members and all(name in text for name in members) for members in wanted):
            found += [(num, f"{shown_path(path)}:{name}") for num, name in _find_classes(text, wanted)]
    return [spec for _, spec in sorted(found)][:_MAX_SUGGESTED]


def _find_classes(text: str, wanted: Collection[Collection[str]]) -> Iterator[tuple[int, str]]:
    """Yield each class that assigns all names of one set, after how many names it assigns."""
    tree = parse(text)
    if tree is None or _may_train(tree):
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        assigned = _names_assigned(name, classes)
        if node.bases and any(members and assigned.issuperset(members) for members in wanted):
            yield len(assigned), name


def _may_train(tree: ast.Module) -> bool:
    """Return True if importing the file runs a loop or one of its own functions."""
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = (node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    return any(isinstance(node, ast.For | ast.While) for node in tree.body) or any(
        getattr(call.func, "id", None) in own for call in calls
    )


def _read(path: Path) -> str:
    """Return the text of a regular file that Python can read; "" for any other."""
    try:
        status = path.stat()
        is_text = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_NBYTES
        return decode_source(path.read_bytes())[0].removeprefix("\ufeff") if is_text else ""
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _find_sources(folders: Collection[Path]) -> Iterator[Path]:
    tops = {folder.resolve() for folder in folders}
    inner = {top / name for top in tops for _, names, _ in islice(os.walk(top), 1) for name in names}
    searched = sorted(tops | {folder for folder in inner if _is_own(folder)})
    return islice((path for folder in searched for path in folder.glob("*.py")), _MAX_FILES)


def _is_own(folder: Path) -> bool:
    """Return True for a folder to search: accessible, not hidden, and without installed packages."""
    return not folder.name.startswith((".", "_")) and os.access(folder, os.X_OK) and not holds_packages(folder)


def _names_assigned(name: str, classes: dict[str, ast.ClassDef], seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the names that a class, and its bases in the same file, set on `self`."""
    if name not in classes or name in seen:
        return set()
    found = set()
    for node in ast.walk(classes[name]):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()):
                found.add(attribute)
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)) if called in _REGISTERING:
                texts = (getattr(argument, "value", None) for argument in node.args[:2])
                found |= {text for text in texts if isinstance(text, str)}
    for base in classes[name].bases:
        found |= _names_assigned(getattr(base, "id", ""), classes, seen | {name})
    return found
