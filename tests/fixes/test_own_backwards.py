"""A Function's own backward is changed like a forward: its gradients are those of float64, for other batches too."""

import pytest
import torch
from tiny_models import Eye
from torch import nn

from nandoctor.autocast.policy import EXACT, REFERENCE, apply_policy
from nandoctor.engine.module_state import run_backward


class HandLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.logsumexp(x.float(), -1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        powers = x.float().exp()
        return gradient[:, None] * powers / powers.sum(-1, keepdim=True)


class Net(Eye):
    def forward(self, x):
        return HandLogSumExp.apply(self.read(x))


@pytest.mark.slow
@pytest.mark.parametrize("powers", [[120.0, 90.0], [120.0, 1.0], [800.0, 1.0]])
def test_a_clamp_in_a_backward_replaces_values(replay, powers):
    """Clamped at 80 two large exponents have a share of one half each: in this batch, or in another.

    Past 709 float64 shows what the gradient is with smaller inputs alone.
    """
    x = torch.tensor([powers, [0.5, -2.0]])
    report = replay(Net, {"x": x}, loss=lambda output, _: output.mean())
    stable, clamp = report.fixes[0], next(item for item in report.fixes if item.edit.kind == "clamp")
    assert stable.verified
    assert "gradient[:, None] * torch.softmax(" in stable.patch
    assert (clamp.kind, clamp.verified) == ("source", False)
    assert clamp.workaround


class HandMish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(nn.functional.softplus(x))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        omega = 4 * (x + 1) + 4 * torch.exp(2 * x) + torch.exp(3 * x) + torch.exp(x) * (4 * x + 6)
        delta = 2 * torch.exp(x) + torch.exp(2 * x) + 2
        return gradient * torch.exp(x) * omega / delta**2


class Branches(Eye):
    def forward(self, x):
        return HandMish.apply(self.read(x))


@pytest.mark.slow
def test_a_gradient_is_not_lost_behind_the_others(replay):
    """Two lines in fp64 leave `delta ** 2` infinite in fp32: a gradient of 0 in place of 1, for one of many samples."""
    x = torch.linspace(-3, 3, 64).reshape(32, 2)
    x[5] = torch.tensor([35.0, 1.0])
    fixes = replay(Branches, {"x": x}, loss=lambda output, _: output.square().mean().sqrt()).fixes
    (verified,) = [fix for fix in fixes if fix.verified]
    assert verified.title.startswith("Compute lines 55, 56 and 57")
    assert verified.patch.count(".double()") == 9


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.half().float()


def test_the_references_widen_a_backward_too():
    model = nn.Linear(1, 1, bias=False)
    for policy, dtype in ((REFERENCE, torch.float32), (EXACT, torch.float64)):
        with apply_policy(policy, torch.device("cpu")):
            loss = 1e-9 * Rounding.apply(model.to(dtype)(torch.ones(1, 1, dtype=dtype))).sum()
            weights = dict(model.named_parameters())
            _, gradients = run_backward(weights, loss, loss_scale=1.0, keep=True, ends_early=False, large=False)
        assert float(gradients["weight"]) > 0  # fp16 rounds 1e-9 to 0
