"""Plain values as the command line's `--model-arg K=V` takes them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

_MAX_OPTION = 2000  # characters of one argument in the command


def as_option(value: Any) -> str | None:
    """The value as `--model-arg` reads it back: a Python literal, or a text that is none; None where that fails."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_OPTION and not _read_literal(value):
        return value
    text = _literal(value)
    return text if text is not None and len(text) <= _MAX_OPTION and _read_literal(text) == [value] else None


def _read_literal(text: str) -> list[Any]:
    """The value that Python reads in the text, by itself; nothing where it is no literal."""
    try:
        return [ast.literal_eval(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


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
