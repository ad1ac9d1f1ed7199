"""Measure the second moments that an optimizer carries, and find the eps that fits their format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.tracing.tensor_stats import format_of, measure_all

_TRIED = tuple(digit * 10.0**power for power in range(-8, -1) for digit in (1, 2, 5))
_ROUNDED_DOWN = 0.7
_LEAST_GRADIENT = 2e-6
"""Smaller gradients hardly train a weight in half precision: a rate of 1e-3 changes it by less than its rounding."""


def measure_slots(moments: Sequence[SecondMoment], model: nn.Module) -> tuple[OptimizerSlot, ...]:
    """Measure every second moment with exact counts."""
    names = _parameter_names(moments, model)
    return tuple(
        OptimizerSlot(parameter=names.get(moment.index, ""), eps=moment.eps, moment=stats, safe_eps=_safe_eps(moment))
        for moment in moments
        for stats in measure_all([("", moment.values)], counts=True)
    )


def _safe_eps(moment: SecondMoment) -> float | None:
    """Return the eps with which the optimizer's steps are least wrong in the format of its moments; None without one.

    Where the square of a gradient is flushed to 0, the step is gradient / eps, and it should be 1 times the rate. The
    largest such gradient moves too far, the smallest too little: the eps between the two errs by the same factor both
    ways. It is 1e-4 for Adam's usual decays in fp16.
    """
    own = format_of(moment.values.dtype)
    assert own is not None
    largest = math.sqrt(own.flush_threshold / (1 - moment.decay))
    middle = math.sqrt(largest * min(_LEAST_GRADIENT, largest))
    return next((eps for eps in _TRIED if eps >= _ROUNDED_DOWN * middle and own.round(eps) != 0), None)


def _parameter_names(moments: Sequence[SecondMoment], model: nn.Module) -> Mapping[int, str]:
    """Return the parameter name of each index: the moment's own, else by the model's order if all shapes agree."""
    parameters = list(model.named_parameters())
    own = {name for name, _ in parameters}
    named = {moment.index: moment.name for moment in moments if moment.name in own}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for given in (parameters, trained):
        if not named and all(m.index < len(given) and given[m.index][1].shape == m.values.shape for m in moments):
            return {moment.index: given[moment.index][0] for moment in moments}
    return named
