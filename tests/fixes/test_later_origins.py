"""Steps that fail in several places, one of which hides the others until it is changed."""

import pytest
import torch
from projects import added, eye
from torch import nn

RMS = "size = torch.sqrt((x * x).mean(-1, keepdim=True))\nx = x * size / size\n"
"""A quotient of zeros, at which the formula tends to 0."""


def test_both_samples_are_mended_and_told(replay_step):
    """One sample of zeros, and beside its NaN another that no element is counted in."""
    x, weight = torch.randn(4, 3, 6), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    x[1] = 0
    mean = "mean = (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)\nreturn self.head(mean)"
    report = replay_step(RMS + mean, {"x": x, "weight": weight}, layers="self.head = nn.Linear(6, 2)")
    best = report.fixes[0]
    assert best.verified
    assert best.kind == "source"
    assert added(best) == [
        "x = x * size / size.clamp(min=1e-12)",
        "divisor = weight.sum(1, keepdim=True)",  # whole numbers, which a batch may have below 0 too
        "mean = (x * weight[..., None]).sum(1) / torch.where(divisor == 0, 1, divisor)",
    ]
    assert [diagnosis.origin.elements.samples for diagnosis in report.also] == [(3,)]


@pytest.mark.slow
def test_the_later_one_may_be_a_matter_of_precision(replay_step):
    """A product of another sample, which passes fp16's range, stands behind a sum that couples the samples."""
    x = torch.ones(4, 4) * torch.tensor([[1.0], [0.0], [1e8], [2.0]])
    product = "batch = x.sum() * 0\nreturn torch.tanh(((given + batch) @ self.weight) * 1e-5)"
    layers = "self.weight = nn.Parameter(torch.full((4, 4), 3e4))"
    report = replay_step("given = x\n" + RMS + product, {"x": x}, layers=layers)
    best = next(fix for fix in report.fixes if fix.kind == "source")
    assert best.verified  # the limit at 0 is found beside 1e8
    assert {type(edit).__name__ for edit in best.edit.edits} == {"ClampArgument", "KeepOp"}


def test_nothing_is_promised_where_the_later_one_stays(replay_step):
    x = torch.ones(2, 4) * torch.tensor([[1.0], [0.0]])
    layers = "self.weight = nn.Parameter(torch.ones(4))"
    report = replay_step(RMS + 'x = x * self.weight\nreturn x * float("nan")', {"x": x}, layers=layers)
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


LAYER = eye(2, 1e4)
"""A layer of torch whose product passes fp16's range."""


@pytest.mark.slow
def test_a_layer_in_fp32_is_written_beside_another_change(replay_step):
    """The logarithm is of a zero, in fp32 too."""
    x = torch.tensor([[1.0, 2.0], [10.0, 3.0], [0.0, 4.0]])
    report = replay_step("h = self.lift(x).float()\nreturn torch.log(h * 1e-4)", {"x": x}, layers=LAYER)
    best = next(fix for fix in report.fixes if fix.kind == "source")
    assert "where the formula gives -Inf" in best.workaround
    assert "h = self.lift(x.float()).float()" in best.patch
    assert "torch.log((h * 1e-4).clamp(min=" in best.patch


@pytest.mark.slow
def test_an_exponential_past_float64_is_an_overflow(replay_step):
    x = torch.tensor([[0.01, 0.02], [10.0, 3.0], [-10.0, 4.0]])
    loss = "return output.float().mean()"
    report = replay_step("return 1 / (1 + torch.exp(-self.lift(x)))", {"x": x}, layers=LAYER, loss=loss)
    best = report.fixes[0]
    assert report.cause.code == "exp-overflow"  # fp32 fails by it too
    assert [diagnosis.cause.code for diagnosis in report.also] == ["matmul-overflow"]
    assert best.verified
    assert "return torch.sigmoid(self.lift(x))" in best.patch


NORMS = [
    pytest.param("h / (torch.sqrt((h * h).sum(-1, keepdim=True)).half() + 1e-8)", marks=pytest.mark.slow),
    "h / (h.pow(2).sum(-1, keepdim=True).sqrt() + 1e-8)",
]


@pytest.mark.parametrize("norm", NORMS)
def test_a_root_of_zero_is_mended_beside_its_eps(replay_step, norm):
    """The eps is one that fp16 rounds to 0, or that its gradients cannot be divided by."""
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    options = {"layers": eye(2), "loss": "return output.float().mean()", "amp_dtype": "float16"}
    fix = replay_step(f"h = self.lift(x)\nreturn {norm}", {"x": x}, **options).fixes[0]
    assert fix.verified
    assert "keepdim=True).clamp(min=1e-6)" in fix.patch
