"""What torch or the model's own code refuses in half precision, or in any other, is told as an error."""

import pytest
import torch
from tiny_models import Returns

from nandoctor.errors import ModelError
from strangers.refused_constants import BATCH, attends
from strangers.visits import Between, normal


def test_a_bound_that_torch_refuses_and_that_hides_nothing(examine):
    with pytest.raises(ModelError, match="without overflow") as caught:
        examine(attends(lambda scores, later: scores.clamp(min=-1e9)), BATCH)
    assert "torch.finfo(x.dtype)" in caught.value.remedy


def test_code_that_takes_half_alone_is_told_of_the_reference(examine):
    def kernel(x):
        if x.dtype is not torch.float16:
            raise TypeError("this kernel takes half")
        return x * 1e6

    with pytest.raises(ModelError, match=r"this kernel takes half \(in fp32, which nandoctor compares with\)"):
        examine(Between(Returns(kernel)), {"x": normal(3, 8)})
    assert examine(Between(Returns(lambda x: x * 1e6)), {"x": normal(3, 8)}).verdict == "precision"
