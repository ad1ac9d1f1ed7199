"""Decide whether an error was raised because of a NaN or infinity in the forward."""

from __future__ import annotations

import math
import traceback
from itertools import dropwhile
from typing import Any

from torch import nn

from nandoctor.capture.joined import can_join
from nandoctor.torch_compat import is_wrapped, tree_tensors


def is_for_nonfinite(error: BaseException | None) -> bool:
    """Return True if a forward raised the error and its local variables show a NaN or +Inf computed from weights.

    -Inf alone may come from a mask. Also True for a FloatingPointError.
    """
    if not isinstance(error, Exception):
        return False
    call = nn.Module.__call__.__code__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = list(dropwhile(lambda frame: frame.f_code is not call, frames))
    tensors = filter(_is_readable, tree_tensors([list(frame.f_locals.values()) for frame in inside]))
    is_shown = any(not (tensor < math.inf).all() for tensor in tensors if tensor.requires_grad)
    return bool(inside) and (is_shown or isinstance(error, FloatingPointError))


def _is_readable(value: Any) -> bool:
    """Return True for a plain tensor of floats wider than a byte, which can be read without asking another rank."""
    is_dense = can_join(value) and not (is_wrapped(value) or value.is_nested or value.is_meta)
    return is_dense and value.is_floating_point() and value.element_size() > 1
