"""What a model's code makes in half precision by name is wide in the references, and as asked for everywhere else."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nandoctor.autocast.policy import EXACT, REFERENCE, Policy, apply_policy
from nandoctor.evidence.formats import BF16, FP16

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 8)
MAKERS = {
    "zeros": lambda dtype: torch.zeros(2, dtype=dtype),
    "tensor": lambda dtype: torch.tensor([1.0], dtype=dtype),
    "arange": lambda dtype: torch.arange(3, dtype=dtype),
    "new": lambda dtype: X.new_full((2,), 1.0, dtype=dtype),
    "like": lambda dtype: torch.ones_like(X, dtype=dtype),
    "to": X.to,
    "to a device": lambda dtype: X.to("cuda", dtype),
    "type": X.type,
    "softmax": lambda dtype: F.softmax(X, dim=0, dtype=dtype),
    "module": lambda dtype: nn.Linear(2, 2).to(dtype).weight,
    "method": lambda dtype: X.half() if dtype is torch.float16 else X.bfloat16(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_half_precision_by_name_is_wide_in_a_reference(maker, dtype):
    made = {}
    for policy in (REFERENCE, EXACT, Policy(name="cuda", format=FP16), Policy(name="cuda", format=BF16, ambient=False)):
        with apply_policy(policy, CPU):
            made[policy.name, policy.ambient] = MAKERS[maker](dtype).dtype
    assert set(made.values()) == {torch.float32, torch.float64, dtype}
    assert (made["fp32", True], made["fp64", True]) == (torch.float32, torch.float64)


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.linear = make, nn.Linear(8, 8)

    def forward(self, x):
        scale = self.make()
        return self.linear(x).to(scale.dtype) + scale * scale


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda: torch.full((8,), 300.0, dtype=torch.half), "precision"),
        (lambda: torch.full((8,), 300.0).half(), "precision"),
        (lambda: torch.full((8,), 30.0, dtype=torch.half), "healthy"),
        (lambda: torch.from_numpy(np.full(8, 300.0, dtype=np.float16)), "numerics"),
    ],
    ids=["made", "cast", "that fits", "from numpy"],
)
def test_a_model_that_makes_half_tensors(make, verdict, half, replay):
    model, x = Made(make), X.repeat(3, 1)
    model, x = (model.half(), x.half()) if half else (model, x)
    report = replay(model, {"x": x, "out": model(x).detach()}, builds=lambda: Made(make), fixes=False)
    told = any("could not be widened" in note for note in report.notes)
    assert (report.verdict, told) == (verdict, verdict == "numerics")
