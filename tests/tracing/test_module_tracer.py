"""What the tracer records of modules of every kind, and that it leaves no trace of its own."""

import math
import weakref

import pytest
import torch
from tiny_models import Chain, FallsBack, Raises, Recursive, Returns
from torch import nn

from nandoctor.tracing.module_tracer import Tracer

ONE = torch.ones(2, 3)


def trace(model, *args, statistics="ranges", **kwargs):
    tracer = Tracer(model, statistics=statistics)
    with torch.no_grad(), tracer:
        model(*args, **kwargs)
    return tracer.calls()


def keys(calls):
    return [call.key for call in calls]


def paths(tensors):
    return [stats.path for stats in tensors]


def test_inputs_are_positions_and_keywords():
    model = Returns(lambda x, **rest: x)
    (call,) = trace(model, ONE, mask=ONE.bool(), bias={"rel": ONE}, scale=2.0)
    assert paths(call.inputs) == ["[0]", "bias.rel"]


def test_calls_are_in_order_of_entry_with_depth_and_one_clock():
    calls = trace(Chain(inner=Chain(leaf=nn.ReLU()), last=nn.Tanh()), ONE)
    assert [(call.module, call.type, call.depth, call.enter, call.leave) for call in calls] == [
        ("", "Chain", 0, 0, 7),
        ("inner", "Chain", 1, 1, 4),
        ("inner.leaf", "ReLU", 2, 2, 3),
        ("last", "Tanh", 1, 5, 6),
    ]


def test_a_shared_module_goes_by_its_first_name():
    shared = nn.ReLU()
    assert keys(trace(Chain(a=shared, b=shared), ONE)) == [("", 0), ("a", 0), ("a", 1)]


def test_a_module_that_calls_itself_is_recorded_inside_out():
    calls = trace(Recursive(), ONE, 2)
    assert [(call.call, call.depth, call.enter, call.leave) for call in calls] == [
        (0, 0, 0, 5),
        (1, 1, 1, 4),
        (2, 2, 2, 3),
    ]
    assert [call.inputs[0].absmax for call in calls] == [1.0, 0.5, 0.25]


def test_inputs_are_read_before_an_in_place_module_writes():
    _, relu = trace(Chain(relu=nn.ReLU(inplace=True)), torch.tensor([-4.0, 2.0]))
    assert (relu.inputs[0].min, relu.outputs[0].min) == (-4.0, 0.0)
    assert relu.inputs[0].sample.tolist() == [-4.0, 2.0]


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[1:].fill_(9), lambda x: x.detach().mul_(3)])
def test_a_write_between_two_reads_is_noticed(write):
    def forward(x):
        model.before(x)
        write(x)
        return model.after(x)

    model = Returns(forward)
    model.before, model.after = nn.Identity(), nn.Identity()
    x = torch.tensor([1.0, 2.0])
    before, after = trace(model, x)[1:]
    assert before.outputs[0].max == 2.0
    assert after.inputs[0].max == float(x.max()) > 2.0


def test_inference_tensors_are_read_every_time():
    model = Chain(zero=Returns(lambda x: x.zero_()), last=nn.Identity())
    with torch.inference_mode():
        zero, last = trace(model, torch.ones(3))[1:]
    assert (zero.inputs[0].max, last.inputs[0].max) == (1.0, 0.0)


def test_an_exception_passes_and_open_calls_never_return():
    model = Chain(first=nn.ReLU(), last=Raises())
    tracer = Tracer(model)
    with pytest.raises(ValueError, match="refused"), tracer:
        model(ONE)
    assert [(call.module, call.leave) for call in tracer.calls()] == [("", None), ("first", 2), ("last", None)]


def test_a_caught_exception_ends_only_the_calls_it_passed():
    calls = trace(FallsBack(), ONE)
    assert [(call.module, call.depth, call.leave is None) for call in calls] == [
        ("", 0, False),
        ("first", 1, True),
        ("first.inner", 2, True),
        ("second", 1, False),
        ("second", 1, False),
    ]


def test_hooks_of_the_user_are_respected():
    model = Chain(child=nn.Identity(), last=nn.Identity())
    model.child.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.child.register_forward_hook(lambda _, args, output: output * 10)
    _, child, last = trace(model, ONE)
    assert (child.inputs[0].max, child.outputs[0].max, last.inputs[0].max) == (2.0, 20.0, 20.0)


def test_no_tensor_is_kept():
    kept = []
    model = Chain(made=Returns(lambda x: x * 2), note=Returns(lambda x: kept.append(weakref.ref(x)) or x + 1))
    with Tracer(model):
        model(ONE)
        assert kept[0]() is None


@pytest.mark.parametrize(("value", "asks"), [(math.nan, True), (math.inf, True), (0.0, False), (1.0, False)])
def test_examination_counts_what_is_nonfinite(value, asks):
    (call,) = trace(nn.Identity(), torch.full((4,), value), statistics="counts")
    assert (call.outputs[0].counts is not None) is asks
    assert trace(nn.Identity(), torch.full((4,), value))[0].outputs[0].counts is None


def test_a_tensor_read_again_for_counts_gets_them():
    tensor = torch.tensor([math.nan, 1.0])
    with Tracer(nn.Identity()) as tracer:
        first, second = tracer.read(tensor), tracer.read(tensor, counts=True)
    assert first[0][1].counts is None
    assert (second[0][1].counts.num_nan, second[0][1].finite_limits) == (1, (1.0, 1.0))


def test_tensors_of_a_subclass_are_measured_as_plain_ones():
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.aminmax, torch.Tensor.clone):
                raise AssertionError("nandoctor's own operations went through the subclass")
            return super().__torch_function__(function, types, args, kwargs or {})

    (call,) = trace(nn.Identity(), ONE.as_subclass(Refuses))
    assert call.outputs[0].max == 1.0
