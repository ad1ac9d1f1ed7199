"""Plain values as the command line's `--model-arg K=V` takes them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

_MAX_OPTION = 2000  # characters of one argument in the command


def as_option(value: Any) -> str | None:
    """The value as `--model-arg` reads it back: a Python literal, or a text that is none; None where that fails."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_OPTION and not _is_literal(value):
        return value
    text = _literal(value)
    if text is None or len(text) > _MAX_OPTION:
        return None
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _literal(value: Any) -> str | None:
    """The value in Python, of plain data alone; an infinity as a number that is too large."""
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return ascii(value)
    if isinstance(value, Mapping):
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    if type(value) not in (list, tuple):
        return None
    items = [_literal(item) for item in value]
    if None in items:
        return None
    inside = ", ".join(map(str, items))
    return f"[{inside}]" if type(value) is list else f"({inside}{',' * (len(items) == 1)})"
