"""The small constants that a model's modules and its optimizer carry.

Those of modules go by name and value alone: what they did only a replay can tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.formats import LARGEST_EPS, FloatFormat
from nandoctor.evidence.report import EpsUse
from nandoctor.tracing.tensor_stats import format_of, measure_all

_TRIED = tuple(digit * 10.0**power for power in range(-8, -1) for digit in (1, 2, 5))
_ROUNDING = 1.05
_IS_EPS = re.compile(r"(^|[^a-z])eps(ilon)?([^a-z]|$)", re.IGNORECASE)  # not the "eps" of "steps"

# Torch's own layers, and the op whose eps theirs is.
_OPS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.LayerNorm, "layer_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.RMSNorm, "rms_norm"),
    *((kind, "batch_norm") for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)),
    *((kind, "instance_norm") for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)),
    (nn.CosineSimilarity, "cosine_similarity"),
    (nn.PairwiseDistance, "pairwise_distance"),
)


def measure_slots(moments: Sequence[SecondMoment], model: nn.Module, low: FloatFormat) -> tuple[OptimizerSlot, ...]:
    """Every second moment with exact counts, flushes judged against `low`."""
    names = _names(moments, model)
    return tuple(
        OptimizerSlot(parameter=names.get(moment.index, ""), eps=moment.eps, moment=stats, safe_eps=_safe_eps(moment))
        for moment in moments
        for stats in measure_all([("", moment.values)], counts_for=low)
    )


def _safe_eps(moment: SecondMoment) -> float | None:
    """The smallest eps tried with which the step is what the optimizer promises: finite, and no longer than its bound.

    The bound, over the learning rate: (1 - beta1) / sqrt(1 - beta2) or 1, from Kingma and Ba, "Adam" (2015), 2.1. A
    gradient that was not kept may be as large as one whose square is still flushed to zero.
    """
    decay1, decay2 = moment.decays
    own = format_of(moment.values.dtype)
    assert own is not None
    bound = max((1 - decay1) / math.sqrt(1 - decay2), 1.0)
    if moment.first is not None:
        gradient = moment.first / (1 - decay1**moment.step)
    else:
        gradient = torch.full_like(moment.values, math.sqrt(own.flush_threshold / (1 - decay2)))
        gradient = gradient.where(moment.values == 0, 0.0)
    root = moment.values.sqrt() / math.sqrt(1 - decay2**moment.step)
    steps = ((eps, gradient / (root + eps)) for eps in _TRIED)
    return next((eps for eps, step in steps if bool((step.abs() <= _ROUNDING * bound).all())), None)


def _names(moments: Sequence[SecondMoment], model: nn.Module) -> Mapping[int, str]:
    """The parameter of each index: by its own name, else by the model's order where every shape agrees with it."""
    parameters = list(model.named_parameters())
    own = {name for name, _ in parameters}
    named = {moment.index: moment.name for moment in moments if moment.name in own}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for given in (parameters, trained):
        if not named and all(m.index < len(given) and given[m.index][1].shape == m.values.shape for m in moments):
            return {moment.index: given[moment.index][0] for moment in moments}
    return named


def list_constants(model: nn.Module) -> tuple[EpsUse, ...]:
    """Every small number among the modules' attributes, or those of their classes, whose name says eps."""
    return tuple(
        EpsUse(place="module", module=path, type=type(module).__name__, name=name, value=value, op=_op_of(module))
        for path, module in model.named_modules()
        for name, value in _constants_of(module)
    )


def _constants_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    attributes = {
        name: value for holder in (*reversed(type(module).__mro__), module) for name, value in vars(holder).items()
    }
    for name, value in attributes.items():
        if isinstance(value, float) and 0 < value <= LARGEST_EPS and _IS_EPS.search(name):
            yield name, value


def _op_of(module: nn.Module) -> str | None:
    """The op of torch's own forward; a subclass that has another may do anything."""
    for kind, op in _OPS:
        if isinstance(module, kind) and type(module).__module__.startswith("torch."):
            return op
    return None
