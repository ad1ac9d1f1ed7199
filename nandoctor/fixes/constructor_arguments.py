"""Finds where a number that modules keep as an attribute comes from: an argument of their class, and its default."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from torch import nn

from nandoctor.evidence.edits import SetAttribute
from nandoctor.fixes.cells import cell_name
from nandoctor.source_files import is_installed
from nandoctor.text import constant


def describe_argument(edit: SetAttribute, model: nn.Module) -> str:
    """Return a comment on how to build the modules with the new number; "" if their class takes no such argument."""
    kind = next((type(module) for module in model.modules() if type(module).__name__ == edit.type), None)
    try:
        parameter = inspect.signature(kind.__init__).parameters[edit.name]  # type: ignore[misc]
    except (TypeError, ValueError, KeyError):
        return ""
    place = _place_of_default(kind, edit.name) if parameter.default == edit.was else ""
    default = f" (its default is in {place})" if place else ""
    return f"# To keep the change, build {edit.type} with {edit.name}={constant(edit.value)}{default}.\n"


def _place_of_default(kind: Any, name: str) -> str:
    """Return the line with the default of the constructor's parameter, as "line 3 of net.py"; "" for a library's."""
    try:
        file = inspect.getsourcefile(kind.__init__) or ""
        lines, first = inspect.getsourcelines(kind.__init__)
        function = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(function, ast.FunctionDef) or not file or is_installed(Path(file)):
        return ""
    named = [*function.args.posonlyargs, *function.args.args]
    pairs = [*zip(reversed(named), reversed(function.args.defaults), strict=False)]
    pairs += [(a, node) for a, node in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if node]
    node = next((node for arg, node in pairs if arg.arg == name), None)
    return f"line {first + node.lineno - 1} of {cell_name(file)}" if node is not None else ""
