"""Random numbers are the same in every precision: a float64 reference is of the same step."""

import pytest
import torch

from nandoctor.autocast.policy import EXACT, REFERENCE, apply_policy
from nandoctor.engine.module_state import draw_in_fp32
from nandoctor.tracing.dispatch_hook import intercepting

CPU = torch.device("cpu")
DRAWS = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "rand": lambda x: torch.rand(*x.shape, dtype=x.dtype),
    "normal": lambda x: torch.normal(x, 1 + 0 * x),
    "normal_": lambda x: torch.empty_like(x).normal_(0.5, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(0.5 + 0 * x),
    "distribution": lambda x: torch.distributions.Normal(0 * x, 1 + 0 * x).rsample(),
    "gumbel": torch.nn.functional.gumbel_softmax,
    "dropout": lambda x: torch.nn.functional.dropout(1 + 0 * x),
    "randint": lambda x: torch.randint(9, x.shape),
}


@pytest.mark.parametrize("name", DRAWS)
def test_float64_draws_what_fp32_does(name):
    made = []
    for policy, dtype in ((REFERENCE, torch.float32), (EXACT, torch.float64)):
        torch.manual_seed(0)
        with apply_policy(policy, CPU), intercepting(draw_in_fp32):
            made.append((DRAWS[name](torch.zeros(4, 16, dtype=dtype)), torch.rand(1, dtype=torch.float32)))
    (narrow, after), (wide, after_wide) = made
    assert wide.dtype in (torch.float64, torch.int64)
    torch.testing.assert_close(wide, narrow.to(wide.dtype), rtol=1e-6, atol=1e-6)
    assert torch.equal(after, after_wide)  # and what is drawn next as well
