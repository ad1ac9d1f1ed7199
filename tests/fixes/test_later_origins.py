"""Steps that fail in several places, one of which hides the others until it is changed."""

import pytest
import torch
from tiny_models import Eye
from torch import nn


class Rms(nn.Module):
    """A quotient of zeros, at which the formula tends to 0."""

    def forward(self, x):
        size = torch.sqrt((x * x).mean(-1, keepdim=True))
        return x * size / size


class TwoSamples(nn.Module):
    """One sample of zeros, and beside its NaN another that no element is counted in."""

    def __init__(self):
        super().__init__()
        self.rms = Rms()
        self.head = nn.Linear(6, 2)

    def forward(self, x, weight):
        mean = (self.rms(x) * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        return self.head(mean)


class Overflow(nn.Module):
    """Zeros divided by zeros in one sample; a product of another, which passes fp16's range, stands behind it."""

    def __init__(self):
        super().__init__()
        self.rms = Rms()
        self.weight = nn.Parameter(torch.full((4, 4), 3e4))

    def forward(self, x):
        batch = self.rms(x).sum() * 0  # couples the samples: one NaN hides all
        return torch.tanh(((x + batch) @ self.weight) * 1e-5)


class Hopeless(nn.Module):
    """Two origins, the second of which no change is known for."""

    def __init__(self):
        super().__init__()
        self.rms = Rms()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.rms(x) * self.weight
        return x * float("nan")


def test_both_samples_are_mended_and_told(replay):
    x, weight = torch.randn(4, 3, 6), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    x[1] = 0
    report = replay(TwoSamples, {"x": x, "weight": weight})
    best = report.fixes[0]
    assert best.verified
    assert best.kind == "source"
    assert [line for line in best.patch.splitlines() if line.startswith("+ ")] == [
        "+        return x * size / size.clamp(min=1e-12)",
        "+        divisor = weight.sum(1, keepdim=True)",  # whole numbers, which a batch may have below 0 too
        "+        mean = (self.rms(x) * weight[..., None]).sum(1) / torch.where(divisor == 0, 1, divisor)",
    ]
    assert [diagnosis.origin.elements.samples for diagnosis in report.also] == [(3,)]


def test_the_later_one_may_be_a_matter_of_precision(replay):
    x = torch.ones(4, 4) * torch.tensor([[1.0], [0.0], [1e8], [2.0]])
    best = next(fix for fix in replay(Overflow, {"x": x}).fixes if fix.kind == "source")
    assert best.verified  # the limit at 0 is found beside 1e8
    assert {type(edit).__name__ for edit in best.edit.edits} == {"ClampArgument", "KeepOp"}


def test_nothing_is_promised_where_the_later_one_stays(replay):
    x = torch.ones(2, 4) * torch.tensor([[1.0], [0.0]])
    report = replay(Hopeless, {"x": x})
    assert not any(fix.verified for fix in report.fixes)
    assert any('`x * float("nan")` writes NaN, which is never removed' in note for note in report.search_notes)


class Logarithm(nn.Module):
    """Of a probability that is 0 in one sample, whose infinity makes all others NaN."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        p = torch.sigmoid(self.scale * x)
        h = torch.log(p)
        return h - h.mean(0)


class LogarithmAndMean(nn.Module):
    """A mean over no element behind it."""

    def __init__(self):
        super().__init__()
        self.read = Logarithm()

    def forward(self, x, weight):
        return (self.read(x) * weight).sum(-1) / weight.sum(-1)


def test_log_space_is_tried_beside_a_later_origin(replay):
    x = torch.tensor([[1.0, -2.0], [40.0, -120.0], [3.0, 4.0]])
    weight = torch.tensor([[1, 1], [1, 0], [0, 0]])
    report = replay(LogarithmAndMean, {"x": x, "weight": weight})
    best = report.fixes[0]
    assert best.verified
    assert "functional.logsigmoid(self.scale * x)" in best.patch
    assert "torch.where(divisor == 0" in best.patch
    assert [diagnosis.cause.headline.partition(" divides")[0] for diagnosis in report.also] == [
        "`(self.read(x) * weight).sum(-1) / weight.sum(-1)`"
    ]


class LayerAndLogarithm(Eye):
    """A layer of torch whose product passes fp16's range, and the logarithm of a zero, in fp32 too."""

    gain = 1e4

    def forward(self, x):
        h = self.read(x).float()
        return torch.log(h * 1e-4)


def test_a_layer_in_fp32_is_written_beside_another_change(replay):
    x = torch.tensor([[1.0, 2.0], [10.0, 3.0], [0.0, 4.0]])
    best = next(fix for fix in replay(LayerAndLogarithm, {"x": x}).fixes if fix.kind == "source")
    assert "where the formula gives -Inf" in best.workaround
    assert "h = self.read(x.float()).float()" in best.patch
    assert "torch.log((h * 1e-4).clamp(min=" in best.patch


class GateByHand(LayerAndLogarithm):
    """The same layer inside of an exponential that passes float64's range."""

    def forward(self, x):
        return 1 / (1 + torch.exp(-self.read(x)))


def test_an_exponential_past_float64_is_an_overflow(replay):
    x = torch.tensor([[0.01, 0.02], [10.0, 3.0], [-10.0, 4.0]])
    report = replay(GateByHand, {"x": x}, loss=lambda made, _: made.float().mean())
    best = report.fixes[0]
    assert report.cause.code == "exp-overflow"  # fp32 fails by it too
    assert [diagnosis.cause.code for diagnosis in report.also] == ["matmul-overflow"]
    assert best.verified
    assert "return torch.sigmoid(self.read(x))" in best.patch


class Normalised(nn.Linear):
    """A hand-written L2 norm with an eps that fp16 rounds to 0, or that its gradients cannot be divided by."""

    def forward(self, x):
        h = super().forward(x)
        return h / (torch.sqrt((h * h).sum(-1, keepdim=True)).half() + 1e-8)


class NormalisedInFp32(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h / (h.pow(2).sum(-1, keepdim=True).sqrt() + 1e-8)


@pytest.mark.parametrize("model", [pytest.param(Normalised, marks=pytest.mark.slow), NormalisedInFp32])
def test_a_root_of_zero_is_mended_beside_its_eps(replay, model):
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    options = {"loss": lambda made, _: made.float().mean(), "amp_dtype": "float16"}
    fix = replay(model(2, 2, bias=False), {"x": x}, **options).fixes[0]
    assert fix.verified
    assert "keepdim=True).clamp(min=1e-6)" in fix.patch
