"""Tensors and arguments as a person would write them in Python."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import torch

from nandoctor.errors import NanDoctorError

_WIDTH = 100
_MAX_NUMEL = 20_000


def write_tensor(tensor: torch.Tensor) -> str:
    """An expression for a dense tensor, on several lines where one would be too long.

    Raises NanDoctorError for one of so many different values that nobody would read them.
    """
    shape, dtype = list(tensor.shape), str(tensor.dtype)
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    values = tensor.flatten().tolist()
    if len(values) > 1 and all(value == values[0] for value in values):
        return f"torch.full({shape}, {_write_number(values[0], tensor.dtype)}, dtype={dtype})"
    if len(values) > _MAX_NUMEL:
        raise NanDoctorError(
            f"It takes {len(values)} different values to fail, too many for a script.",
            remedy="`nandoctor replay -o report.json` keeps what is known of them.",
        )
    line = f"torch.tensor({_write_nested(tensor.tolist(), tensor.dtype)}, dtype={dtype})"
    return line if len(line) <= _WIDTH else _wrap(line, dtype)


def write_value(value: Any) -> str:
    """An expression for a plain argument of an op."""
    if isinstance(value, float):
        return _write_number(value, torch.float64)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, torch.device):
        return "torch.get_default_device()"
    if value is None or isinstance(value, (bool, int, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise NanDoctorError(
        f"The op takes a {type(value).__name__}, which no literal can stand for.",
        remedy="`nandoctor replay -o report.json` keeps what is known of the op.",
    )


def _write_nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_write_nested(value, dtype) for value in values)}]"
    return _write_number(values, dtype)


def _write_number(value: Any, dtype: torch.dtype) -> str:
    """As few digits as give the same number again in its format; `inf` and `nan` by their names."""
    if not isinstance(value, float) or not math.isfinite(value):
        return repr(value)
    digits = (repr(float(f"{value:.{count}g}")) for count in range(1, 18))
    return next(text for text in digits if float(torch.tensor(float(text), dtype=dtype)) == value)


def _wrap(line: str, dtype: str) -> str:
    body = line.removeprefix("torch.tensor(").removesuffix(f", dtype={dtype})")
    rows = textwrap.fill(body, _WIDTH - 4, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"torch.tensor(\n{rows},\n    dtype={dtype},\n)"
