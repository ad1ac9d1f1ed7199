"""The saved state of an optimizer, measured and given the names of the model's parameters.

In: the second moments of a dump, and the model. Out: `OptimizerSlot`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from nandoctor.dumps.moments import SecondMoment
from nandoctor.engine.stats import collect, measure
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.optimizer import OptimizerSlot


def measure_slots(moments: Sequence[SecondMoment], model: nn.Module, low: FloatFormat) -> tuple[OptimizerSlot, ...]:
    """Every second moment with an exact census, flushes judged against `low`."""
    names = _names(moments, model)
    slots = []
    for moment in moments:
        reading = measure(moment.values, census_for=low)
        if reading is not None:
            (stats,) = collect([("", reading)])
            slots.append(OptimizerSlot(parameter=names.get(moment.index, ""), eps=moment.eps, moment=stats))
    return tuple(slots)


def _names(moments: Sequence[SecondMoment], model: nn.Module) -> Mapping[int, str]:
    """The parameter of each index: by its own name, else by the model's order where every shape agrees with it."""
    parameters = list(model.named_parameters())
    named = {moment.index: moment.name for moment in moments if moment.name in dict(parameters)}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for given in (parameters, trained):
        if not named and all(m.index < len(given) and given[m.index][1].shape == m.values.shape for m in moments):
            return {moment.index: given[moment.index][0] for moment in moments}
    return named
