"""Decide whether an error was raised because of a NaN or infinity in the forward."""

from __future__ import annotations

import math
import re
import traceback
from itertools import dropwhile
from types import FrameType
from typing import Any

from torch import nn

from nandoctor.capture.async_flags import all_finite
from nandoctor.capture.joined import can_join
from nandoctor.torch_compat import is_wrapped, tree_tensors

_SAID = re.compile(r"(?i)\b(nans?|infs?|infinit[ey]|(non|not)[- ]?finite|not a number|invalid values)\b")
_OF_VALUES = (ValueError, RuntimeError, ArithmeticError, AssertionError)
"""Errors of other classes name something missing, which may be called "inf"."""


def is_for_nonfinite(error: BaseException | None) -> bool:
    """Return True if a forward raised the error and its local variables show a NaN or +Inf computed from weights.

    -Inf alone may come from a mask. Also True for a FloatingPointError, and if the message mentions NaN or infinity and
    either a variable is non-finite, or the last line has no `raise`: then torch raised it, perhaps about a temporary.
    """
    call, inside = nn.Module.__call__.__code__, list[FrameType]()
    while isinstance(error, Exception):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # The traceback of an error that was caught inside the forward starts there, below `__call__`.
        inside = list(dropwhile(lambda frame: frame.f_code is not call, frames)) or (frames if inside else [])
        if inside:
            held = list(filter(_is_readable, tree_tensors([list(frame.f_locals.values()) for frame in inside])))
            spoilt = any(tensor.requires_grad and not (tensor < math.inf).all() for tensor in held)
            if spoilt or isinstance(error, FloatingPointError):
                return True
            if isinstance(error, _OF_VALUES) and _SAID.search(str(error)[:10_000]):
                is_own = "raise" not in (traceback.extract_tb(error.__traceback__)[-1].line or "")
                return is_own or not all_finite(held)
        error = error.__cause__ or error.__context__
    return False


def _is_readable(value: Any) -> bool:
    """Return True for a plain tensor of floats wider than a byte, which can be read without asking another rank."""
    is_dense = can_join(value) and not (is_wrapped(value) or value.is_nested or value.is_meta)
    return is_dense and value.is_floating_point() and value.element_size() > 1
