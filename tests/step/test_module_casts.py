"""Weights, inputs and outputs are cast as FSDP2 casts them, and follow the weights where a reference widens these."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import ModuleCasts, Recorded, read_recorded
from nandoctor.errors import DumpError
from nandoctor.step.weights import add_casts, cast_weights

CASTS = ModuleCasts(
    parameters={"0.weight": "float16", "0.bias": "float16", "1.weight": "bfloat16", "1.bias": "bfloat16"},
    inputs={"0": "float16", "1": "bfloat16", "gone": "float16"},
    outputs={"": "float32"},
)


def recorded(casts=CASTS):
    return Recorded(mixed_precision=casts)


def dump_of(state, casts=CASTS):
    return Dump(path=Path("x"), nbytes=0, layout="nandoctor.dump/1", state=state, arrays={}, recorded=recorded(casts))


def seen(model):
    found = []
    for layer in model:
        layer.register_forward_hook(lambda _, args, output: found.append((args[0].dtype, output.dtype)))
    return found


def test_each_module_computes_in_its_own_format():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    state = cast_weights(dump_of(model.state_dict())).state
    assert [state[f"{i}.weight"].dtype for i in range(3)] == [torch.float16, torch.bfloat16, torch.bfloat16]
    for name, parameter in model.named_parameters():
        parameter.data = state[name]
    add_casts(model, recorded())
    found = seen(model)
    assert model(torch.ones(1, 2)).dtype is torch.float32
    half, brain = torch.float16, torch.bfloat16
    assert found == [(half, half), (brain, brain), (brain, brain)]


def test_inputs_follow_weights_that_a_reference_widens():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    add_casts(model.double(), recorded())
    found = seen(model)
    assert model(torch.ones(1, 2, dtype=torch.float64)).dtype is torch.float64
    assert found == [(torch.float64, torch.float64)] * 2


def test_a_weight_that_the_cast_overflows_is_told():
    dump = cast_weights(dump_of({"0.weight": torch.tensor([1e5]), "0.bias": torch.tensor([float("inf")])}))
    assert dump.notes == ("FSDP's policy casts these weights to a format that they overflow: 0.weight.",)
    assert cast_weights(dump_of({}, casts=None)).notes == ()


@pytest.mark.parametrize("dtype", ["int8", "load", 3, ["float16"]])
def test_a_format_that_is_none_is_refused(dtype):
    with pytest.raises(DumpError):
        read_recorded({"mixed_precision": {"parameters": {"a": dtype}}}, lambda name, _: name, keep=None)


def test_a_narrow_sum_over_ranks_is_told():
    casts = replace(CASTS, gradients={"": "float32", "0": "float16"})
    (note,) = cast_weights(dump_of({}, casts)).notes
    assert "float16 (reduce_dtype)" in note
