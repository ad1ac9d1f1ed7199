"""Build traces by hand: a few calls with the numbers that matter, and defaults for the rest. Trace a model's ops."""

import math

import numpy as np
import torch

from nandoctor.autocast.policy import Policy
from nandoctor.engine.call import Call, Mode
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.evidence.formats import FP16, FP32
from nandoctor.evidence.trace import ModuleCall, NonfiniteCounts, TensorStats, Trace

FP16_AUTOCAST = Policy(name="cuda", format=FP16)

NAN, INF = math.nan, math.inf


def stats(*values, path="", shape=None):
    finite = [value for value in values if math.isfinite(value)]
    nonfinite = [index for index, value in enumerate(values) if not math.isfinite(value)]
    magnitudes = sorted(abs(value) for value in finite if value)
    return TensorStats(
        path=path,
        shape=shape or (len(values),),
        dtype=FP32,
        numel=len(values),
        finite=not nonfinite,
        min=min(finite, default=None),
        max=max(finite, default=None),
        absmax=max(map(abs, finite), default=None),
        p05=magnitudes[0] if magnitudes else None,
        median=magnitudes[len(magnitudes) // 2] if magnitudes else None,
        counts=NonfiniteCounts(
            num_nan=sum(math.isnan(value) for value in values),
            num_posinf=values.count(INF),
            num_neginf=values.count(-INF),
            num_zero=values.count(0.0),
            smallest=magnitudes[0] if magnitudes else None,
            first_bad_index=(nonfinite[0],) if nonfinite else None,
            samples=tuple(nonfinite),
        ),
        sample=np.array(values, dtype=np.float32),
    )


GOOD = stats(1.0)


def call(module, enter, leave, *, inputs=(GOOD,), outputs=(GOOD,), depth=None, number=0, state=()):
    """Return a call of a module; its depth defaults to that of the dotted path."""
    return ModuleCall(
        module=module,
        type=module.rpartition(".")[2].capitalize() or "Net",
        call=number,
        depth=len(module.split(".")) if depth is None and module else depth or 0,
        enter=enter,
        leave=leave,
        inputs=inputs,
        outputs=() if leave is None else outputs,
        state=state,
    )


def trace(*calls, batch=(GOOD,), output=(GOOD,), low=True, raised=None, **fields):
    return Trace(
        policy="cuda" if low else "fp32",
        format=FP16 if low else FP32,
        training=True,
        seed=0,
        calls=calls,
        batch=batch,
        output=output,
        elapsed_s=0.0,
        raised=raised,
        **fields,
    )


def reference(*calls, **fields):
    return trace(*calls, low=False, **fields)


def make_step(model, batch, policy=FP16_AUTOCAST, *, forward=None, training=True, **fields):
    """Return the step that calls the model with one tensor, or with those of a dict in their order."""
    batch = {"x": batch} if isinstance(batch, torch.Tensor) else batch
    forward = forward or (lambda arrays: model(*arrays.values()))
    call = Call(batch=batch, used=frozenset(batch), forward=forward, description="model(x)")
    mode = Mode(policy=policy, device=torch.device("cpu"), training=training)
    return FailingStep(model=model, call=call, mode=mode, **fields)


def trace_ops(model, x):
    return make_step(model, x).run(watch=Watch(ops=True)).trace.ops
