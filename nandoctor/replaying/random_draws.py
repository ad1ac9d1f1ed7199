"""Draws the same random numbers in float64 as in fp32, so that a float64 run is of the same step.

`randn` and `rand` take another number of bits from the generator in float64 than in fp32, so that everything after them
differs; fp16 and bf16 draw what fp32 does, rounded. Dropout draws the same mask in every format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nandoctor.torch_compat import schema_of, tree_leaves, tree_map
from nandoctor.tracing.dispatch_hook import Proceed, intercepting
from nandoctor.tracing.op_call import Invocation

_DRAWING = frozenset(
    "rand randn rand_like randn_like normal normal_functional uniform exponential log_normal cauchy geometric random "
    "bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet".split()
)


@contextmanager
def drawn_in_fp32() -> Iterator[None]:
    """A context in which float64 random numbers are drawn in fp32, and cast."""
    with intercepting(_draw):
        yield


def _draw(call: Invocation, proceed: Proceed) -> Any:
    if not call.is_random or call.name not in _DRAWING:
        return proceed(call)
    if schema_of(call.op).name.endswith("_"):
        return _draw_in_place(call, proceed)
    by_default = _follows_default(call) and torch.get_default_dtype() is torch.float64
    if not (by_default or any(map(_is_wide, tree_leaves((call.args, call.kwargs))))):
        return proceed(call)
    narrow = call.mapped(_narrow)
    return tree_map(_widen, proceed(narrow.with_argument("dtype", torch.float32) if by_default else narrow))


def _draw_in_place(call: Invocation, proceed: Proceed) -> Any:
    target = call.args[0]
    if not _is_wide(target):
        return proceed(call)
    return target.copy_(proceed(call.with_argument("self", torch.empty_like(target, dtype=torch.float32))))


def _follows_default(call: Invocation) -> bool:
    """Tell whether what is drawn has torch's default dtype: neither a tensor nor the call says another."""
    has_dtype = any(argument.name == "dtype" for argument in schema_of(call.op).arguments)
    return has_dtype and call.kwargs.get("dtype") is None and next(call.tensors(), None) is None


def _is_wide(value: Any) -> bool:
    return value is torch.float64 or (isinstance(value, torch.Tensor) and value.dtype is torch.float64)


def _narrow(value: Any) -> Any:
    if not _is_wide(value):
        return value
    return value.float() if isinstance(value, torch.Tensor) else torch.float32


def _widen(value: Any) -> Any:
    drawn = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return value.double() if drawn else value
