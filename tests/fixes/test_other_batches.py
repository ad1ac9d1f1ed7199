"""What a printed fix does in a batch unlike the one that failed: at the edge, below zero, with a NaN, at a cast."""

from contextlib import contextmanager

import pytest
import torch
from projects import EYE

import nandoctor
from nandoctor.changes.mask_first import MaskFirst
from nandoctor.torch_compat import kernel_library

ROOT = "return torch.sqrt(h)", [[1.0, 0.5, 0.0, 2.0], [0.5] * 4]
ANGLE = "return torch.acos(h * 0.5)", [[1.0, 0.5, -0.25, 2.0], [0.5] * 4]
CIRCLE = "return torch.sqrt(1 - h * h)", [[1.0000001, 0.5, 0.0, 0.2], [0.5] * 4]
LOGARITHM = "return torch.stack([torch.log(row + 0) for row in h])", [[1.0, 0.5, 0.0, 2.0], [0.5] * 4]
RATIO = "return h / h.sum(-1, keepdim=True)", [[0.0] * 4, [0.25] * 4]
UNIT = "return h / h.abs().sum(-1, keepdim=True)", [[0.0] * 4, [0.25] * 4]
COUNT = "return h / (x > 1).sum(-1, keepdim=True)", [[0.5] * 4, [2.0] * 4]
INVERSE = "return torch.tanh(h[:, :1] ** -1)", [[0.0, 2.0, -1.0, -2.0], [0.5] * 4]
HIDDEN = "return torch.where(h > 0.5, h.sqrt() * 2, h)", [[1.0, 0.5, 0.0, 2.0], [0.25] * 4]
EMPTY = "return h + h[h > 5].mean()", [[1.0, 0.5, 0.25, 2.0], [0.25] * 4]


@pytest.fixture
def patched(project):
    """A function (body, x) -> the best fix, and the model of the file with it as `git apply` leaves it."""

    def patched(body, x):
        loss = "return (output.float() * torch.arange(1.0, output.shape[-1] + 1)).mean()"
        project.write(f"h = self.lift(x)\n{body}", layers=EYE, loss=loss)
        project.save(x=torch.tensor(x))
        report = project.replay(max_trials=100)
        fix = report.fixes[0]
        assert (fix.verified or fix.workaround is not None, fix.kind) == (True, "source"), report.headline
        project.apply(fix)
        return fix, project.build()

    return patched


def run(model, x):
    model.zero_grad()
    output = model(torch.tensor(x))
    output.mean().backward()
    return output.detach(), model.lift.weight.grad


@pytest.mark.parametrize(
    ("case", "edges"),
    [
        pytest.param(ROOT, [0.0], id="root"),
        pytest.param(ANGLE, [2.0], id="angle", marks=pytest.mark.slow),
        pytest.param(LOGARITHM, [0.0], id="comprehension", marks=pytest.mark.slow),
        pytest.param(HIDDEN, [0.0], id="hidden", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_finite_at_the_edge_itself(case, edges, patched):
    fix, model = patched(*case)
    for edge in edges:
        output, gradient = run(model, [[edge] * 4, [0.5] * 4])
        assert output.isfinite().all()
        assert gradient.isfinite().all()
    checks = [check.status for check in fix.checks if check.name == "values at the edge"]
    assert checks == ([] if isinstance(fix.edit, MaskFirst) else ["passed"])
    assert "min=0)" not in fix.patch


@contextmanager
def gradient_at_bound(gradient):
    """Give clamps this gradient where the value is the lower bound: torch's is 1 up to 2.13, and 0 since."""

    def clamp(tensor, min=None, max=None):  # noqa: A002
        low = torch.full_like(tensor, -torch.inf if min is None else min)
        kept = torch.where(tensor < low if gradient else tensor <= low, low, tensor)
        return kept if max is None else torch.minimum(kept, torch.full_like(kept, max))

    with kernel_library("aten") as library:
        library.impl("clamp", clamp, "AutogradCPU")
        yield


@pytest.mark.parametrize("gradient", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_bound_that_fp16_rounds_to_the_edge_is_refused(gradient, patched):
    with gradient_at_bound(gradient):
        _, model = patched(*CIRCLE)
    with gradient_at_bound(1), nandoctor.cuda_autocast():
        assert run(model, [[1.0] * 4, [0.5] * 4])[1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "other"),
    [
        (RATIO, [[-1.0, -2.0, -3.0, -4.0], [0.5, -2.5, 0.5, 0.5]]),
        (INVERSE, [[-1.0, 1.0, 1.0, 1.0], [4.0] * 4]),
        (COUNT, [[2.0, 0.0, 0.0, 2.0], [2.0] * 4]),
        (UNIT, [[-1.0, -2.0, -3.0, -4.0], [0.5] * 4]),
    ],
    ids=["sum", "power", "count", "norm"],
)
def test_other_divisors_are_left_as_they_are(case, other, patched):
    fix, model = patched(*case)
    h = torch.tensor(other)
    whole = eval(case[0].removeprefix("return "), {"h": h, "x": h, "torch": torch})
    assert torch.allclose(run(model, other)[0], whole)
    assert "clamp" not in fix.patch


@pytest.mark.parametrize(
    "case", [pytest.param(HIDDEN, id="hidden", marks=pytest.mark.slow), pytest.param(EMPTY, id="empty")]
)
def test_a_nan_from_upstream_stays_one(case, patched):
    _, model = patched(*case)
    with torch.no_grad():
        model.lift.weight.fill_(float("nan"))
    assert model(torch.full((2, 4), 9.0)).isnan().all()
