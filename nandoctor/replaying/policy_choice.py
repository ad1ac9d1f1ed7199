"""Which precision a step may have failed under, the likeliest first: what the grade of a replay then decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from nandoctor.autocast.policy import LOW_DTYPES, Policy, make_plain_policy, make_policy
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.numpy_pickle import stored_values
from nandoctor.dumps.recorded_format import Autocast
from nandoctor.evidence.formats import BF16, FORMATS, FP16, FloatFormat
from nandoctor.replaying.settings import Settings
from nandoctor.tracing.tensor_stats import format_of

_ENOUGH = 8
"""So many values that all fit a format tell that they were computed in it."""


def choose_policies(dump: Dump, settings: Settings, saved: torch.Tensor | None = None) -> tuple[Policy, ...]:
    """The user's word; else what the recorder saw; else what there is to try, by the weights and the `saved` output."""
    recorded = dump.recorded.autocast if dump.recorded is not None else None
    weights = low_format(dump.state)
    if settings.amp_dtype is not None or settings.policy is not None:
        told = FORMATS[settings.amp_dtype] if settings.amp_dtype else _recorded_format(recorded) or weights or FP16
        ambient = recorded is None or recorded.enabled or settings.amp_dtype is not None
        return (make_policy(settings.policy or _name(recorded), told, ambient=ambient),)
    if recorded is not None:
        if not recorded.enabled:
            return (make_plain_policy(weights, _name(recorded)),)
        return (make_policy(_name(recorded), _recorded_format(recorded) or weights or FP16),)
    low = weights or (None if saved is None else _computed_in(saved)) or FP16
    autocast = [make_policy("cuda", low), make_policy("cuda", BF16 if low is FP16 else FP16)]
    without = make_plain_policy(weights)
    return (without, *autocast) if weights is not None else (*autocast, without)


def low_format(state: Mapping[str, torch.Tensor]) -> FloatFormat | None:
    """The half-precision format that all weights were saved in; None where some are in another."""
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point() or tensor.is_complex()}
    return format_of(next(iter(dtypes))) if len(dtypes) == 1 and dtypes <= set(LOW_DTYPES) else None


def _name(autocast: Autocast | None) -> Literal["cuda", "native"]:
    """Whose op lists a recorded autocast followed; those of CUDA where nothing is known."""
    return "cuda" if autocast is None or autocast.device == "cuda" or autocast.emulated else "native"


def _recorded_format(autocast: Autocast | None) -> FloatFormat | None:
    if autocast is None or not autocast.enabled or autocast.dtype not in ("float16", "bfloat16"):
        return None
    return FORMATS[autocast.dtype]


def _computed_in(saved: torch.Tensor) -> FloatFormat | None:
    """The half-precision format of a saved output, or the one that all its values fit in, as `.float()` leaves them."""
    if saved.dtype in LOW_DTYPES:
        return format_of(saved.dtype)
    if saved.dtype is not torch.float32:
        return None
    values = stored_values(saved.detach()).flatten()
    values = values[torch.isfinite(values) & (values != 0)]
    if values.numel() < _ENOUGH:
        return None
    fitting = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(values.to(dtype).float(), values))
    return next(map(format_of, fitting), None)
