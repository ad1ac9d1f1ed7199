"""The end of memory is told as that."""

import pytest
import torch
from torch import nn

from nandoctor.autocast.policy import REFERENCE
from nandoctor.engine.module_state import copied_input
from nandoctor.errors import ModelError
from nandoctor.machine import is_out_of_memory
from nandoctor.step.model_loading import build_model

HUGE = 1 << 40


def test_the_end_of_memory_does_not_blame_the_model():
    with pytest.raises(ModelError, match="There is not enough memory to build"):
        build_model(lambda: nn.Linear(HUGE, 1 << 20), {})
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes"))


def test_exceptions_that_came_from_each_other_have_an_end():
    first, second = RuntimeError("shapes"), ValueError("of a leaf")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_an_expanded_input_stays_expanded_in_a_run():
    large, small = torch.ones(1).half().expand(1 << 42), torch.ones(1, 3).expand(5, 3)
    copy = copied_input(large, REFERENCE.wider)
    assert (copy.shape, copy.dtype, copy.untyped_storage().nbytes()) == (large.shape, torch.float32, 4)
    assert copied_input(small, REFERENCE.wider).mul_(2).tolist() == [[2.0] * 3] * 5
    assert small.tolist() == [[1.0] * 3] * 5
