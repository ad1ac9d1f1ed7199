"""What an op is recorded to have read, where an edit changes it on the way."""

import pytest
import torch

from nandoctor.tracing.dispatch_hook import intercepting
from nandoctor.tracing.op_tracer import OpTracer


def widen(call, proceed):
    return proceed(call.mapped(lambda value: value.double() if isinstance(value, torch.Tensor) else value))


def clamp(call, proceed):
    given = dict(call.arguments())
    return proceed(call.with_argument("self", given["self"].clamp(max=1.0)))


@pytest.mark.parametrize("edit", [widen, clamp])
def test_operands_of_an_edited_op_keep_their_origin(edit):
    x = torch.tensor([1.0, float("inf")])
    tracer = OpTracer(known=[("batch", "x", x)])
    edited = intercepting(lambda call, proceed: edit(call, proceed) if call.name == "exp" else proceed(call))
    with edited, tracer.watching(lambda: ("", "", 0)):
        torch.exp(x * 2)
        torch.exp(x)
    doubled, of_doubled, of_input = tracer.calls()
    assert of_doubled.inputs[0].producer == doubled.order
    assert (of_input.inputs[0].origin, of_input.inputs[0].path) == ("batch", "x")


def test_operands_from_nowhere_stay_unknown():
    unknown, tracer = torch.ones(1), OpTracer(known=[])
    with intercepting(widen), tracer.watching(lambda: ("", "", 0)):
        torch.exp(unknown)
    (call,) = tracer.calls()
    assert call.inputs[0].origin == "unknown"
