"""Run the optimizer's step once more, as the recorder saw it; measure the second moments that it carries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.dumps.classify import SecondMoment
from nandoctor.dumps.recorded_format import Updater
from nandoctor.engine.module_state import restored
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.engine.user_code import kept_running, raised_at
from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.trace import UpdateTrace
from nandoctor.text import brief
from nandoctor.torch_compat import plain_torch
from nandoctor.tracing.module_tracer import NOWHERE
from nandoctor.tracing.op_tracer import OpTracer
from nandoctor.tracing.tensor_stats import all_finite, format_of, measure_all

_ONE_BY_ONE = {"foreach": False, "fused": False, "capturable": False}
"""Settings of torch's own optimizers, which otherwise update all weights in one op."""


def trace_update(step: FailingStep, updater: type[Optimizer] | None) -> UpdateTrace:
    """Return what the optimizer's step computes; only a note if its code may not be run, or raises.

    The optimizer starts from its state after the update, since no other was recorded; a weight whose state is
    non-finite by then starts without any.
    """
    saved = step.recorded.updater
    if saved is None or updater is None:
        return _not_run("its class is not in the file, is not found here, or is not yours to run")
    if step.loss is None:
        return _not_run("the loss, and so its gradients, are not known")
    outcome = step.run(watch=Watch(stage="update", backward=True, keep=True))
    grads = outcome.gradients or {}
    parameters = dict(step.model.named_parameters())
    low = next(filter(None, (format_of(parameter.dtype) for parameter in parameters.values())), FP32)
    ops = OpTracer(known=[("weight", *named) for named in parameters.items()], phase="optimizer")
    with restored(step.model):
        for name, weight in parameters.items():
            weight.grad = grads.get(name)
        try:
            optimizer = _make(updater, saved, parameters)
            with kept_running(), ops.watching(lambda: NOWHERE):
                optimizer.step()
        except Exception as error:
            return _not_run(f"it raised {type(error).__name__}{raised_at(error)}: {error}")
        with plain_torch():
            made = {name: ops.producer_of(weight) for name, weight in parameters.items() if not all_finite(weight)}
        spoiled = {name: order for name, order in made.items() if order is not None}
        notes = (
            () if spoiled else ("Run again, from the optimizer's state after it, the update leaves finite weights.",)
        )
        return UpdateTrace(ops=ops.calls(), spoiled=spoiled, low=low, notes=notes)


def _not_run(why: str) -> UpdateTrace:
    return UpdateTrace(notes=(f"The update was not run again, so its line is not known: {brief(why)}.",))


def _make(kind: type[Optimizer], saved: Updater, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer:
    """Return an optimizer of that class as it was, without a call of its constructor: nobody recorded its arguments."""
    groups = [
        {**group, **{name: value for name, value in _ONE_BY_ONE.items() if name in group}, "params": trained}
        for group in saved.groups
        if (trained := [parameters[name] for name in group["params"] if name in parameters])
    ]
    optimizer = kind.__new__(kind)
    Optimizer.__init__(optimizer, groups, dict(saved.arguments.get("defaults", {})))
    made = vars(optimizer)
    made.update({name: value for name, value in saved.arguments.items() if name not in made})
    for name, slots in saved.state.items():
        tensors = [value for value in slots.values() if isinstance(value, torch.Tensor)]
        if name in parameters and all(map(all_finite, tensors)):
            copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in slots.items()}
            optimizer.state[parameters[name]] = copies
    return optimizer


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
