"""Run the optimizer's step once more, as the recorder saw it, and record what it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from nandoctor.dumps.recorded_format import Updater
from nandoctor.engine.kept_state import restored
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.engine.user_code import kept_running
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.trace import UpdateTrace
from nandoctor.torch_compat import plain_torch
from nandoctor.tracing.module_tracer import NOWHERE
from nandoctor.tracing.op_tracer import OpTracer
from nandoctor.tracing.tensor_stats import all_finite, format_of

_ONE_BY_ONE = {"foreach": False, "fused": False, "capturable": False}
"""Settings of torch's own optimizers, which otherwise update all weights in one op."""


def trace_update(step: FailingStep, updater: type[Optimizer] | None) -> UpdateTrace:
    """Return what the optimizer's step computes; nothing if its code may not be run, or raises.

    The optimizer starts from its state after the update, since no other was recorded; a weight whose state is
    non-finite by then starts without any.
    """
    saved = step.recorded.updater
    if updater is None or step.loss is None or saved is None:
        return UpdateTrace()
    outcome = step.run(watch=Watch(stage="update", backward=True, keep=True))
    gradients = outcome.gradients or {}
    parameters = dict(step.model.named_parameters())
    grads = {name: gradient / outcome.gradient_scale for name, gradient in gradients.items()}
    low = next(filter(None, (format_of(parameter.dtype) for parameter in parameters.values())), FP32)
    ops = OpTracer(known=[("weight", *named) for named in parameters.items()], phase="optimizer")
    with restored(step.model):
        for name, weight in parameters.items():
            weight.grad = grads.get(name)
        try:
            optimizer = _make(updater, saved, parameters)
            with kept_running(), ops.watching(lambda: NOWHERE):
                optimizer.step()
        except Exception:
            return UpdateTrace()
        with plain_torch():
            made = {name: ops.producer_of(weight) for name, weight in parameters.items() if not all_finite(weight)}
        spoiled = {name: order for name, order in made.items() if order is not None}
        return UpdateTrace(ops=ops.calls(), spoiled=spoiled, low=low)


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
