"""An average of nothing becomes a sum over a count of at least 1, and any other average stays what it was."""

import math
import runpy

import pytest
import torch

LOSSES = {
    "mse": 'F.mse_loss(output[valid], batch["y"][valid])',
    "labels": "F.cross_entropy(output, torch.where(valid, labels, -1), ignore_index=-1)",
    "mean": '(output - batch["y"])[valid].square().mean()',
    "comprehension": """sum(
        [F.l1_loss(o[v], y[v]) for o, y, v in zip(output, batch["y"], valid[:, None].expand(-1, 3))]
    )""",
}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form != "labels" else []) for form in LOSSES]
)
def test_an_average_of_nothing_is_zero(form, project):
    loss = f'valid, labels = batch["valid"], batch["labels"]\nreturn {LOSSES[form]}'
    project.write("return self.lift(x)", layers="self.lift = nn.Linear(4, 3)", loss=loss)
    batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 3), "labels": torch.arange(5) % 3}
    batch["valid"] = torch.zeros(5, dtype=torch.bool)
    project.save(**batch)
    (fix, *_) = project.replay(mode="train").fixes
    assert (fix.verified, fix.kind, "isnan" in fix.patch) == (True, "source", False)
    before = runpy.run_path("net.py")["loss"]
    project.apply(fix)
    after, output = runpy.run_path("net.py")["loss"], torch.randn(5, 3)
    assert after(output, batch) == 0
    whole = {**batch, "valid": torch.ones(5, dtype=torch.bool)}
    assert math.isclose(after(output, whole), before(output, whole), rel_tol=1e-6)
    assert math.isfinite(after(output, {**batch, "valid": torch.tensor([True, True, True, False, True])}))


@pytest.mark.parametrize(
    "form", ["h[group == k].std(0)", pytest.param("torch.var(h[group == k], dim=0)", marks=pytest.mark.slow)]
)
def test_one_value_has_no_spread(form, project):
    parts = f"[(h[group == k].amax(0) - 1) / ({form} + 1) for k in range(2)]"
    forward = f"h = self.lift(x)\nparts = {parts}\nreturn torch.stack(parts)"
    project.write(forward, inputs="x, group", layers="self.lift = nn.Linear(4, 3)")
    project.save(x=torch.randn(4, 4), group=torch.tensor([0, 1, 0, 0]))
    (fix, *_) = project.replay().fixes
    assert (fix.verified, fix.kind) == (True, "source")
    assert "correction=min(1, h[group == k].shape[0] - 1)" in fix.patch


def test_one_pixel_has_no_spread(project):
    spread = "h = self.down(x)\nstd, mean = torch.std_mean(h, (2, 3), keepdim=True)"
    project.write(f"{spread}\nreturn (h - mean) / (std + 0.1)", layers="self.down = nn.Conv2d(3, 8, 4, stride=4)")
    project.save(x=torch.randn(2, 3, 4, 4))
    (fix, *_) = project.replay().fixes
    assert fix.verified
    assert "(2, 3), keepdim=True, correction=min(1, h.shape[2] * h.shape[3] - 1))" in fix.patch


LAYERS = """
self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
self.center = nn.Parameter(torch.arange(3.0))
"""


def fix_average(form, num_valid, project):
    """The model without and with the fix of an average over the valid rows of a layer's output."""
    project.write(f"h = self.fc(x)\nreturn h, {form}", inputs="x, valid", layers=LAYERS)
    before = project.build()
    project.save(before.state_dict(), x=torch.randn(5, 4), valid=torch.arange(5) < num_valid)
    (fix, *_) = project.replay(mode="train").fixes
    assert fix.verified
    project.apply(fix)
    after = project.build()
    after.load_state_dict(before.state_dict())
    return before, after


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "form",
    [
        "F.mse_loss(self.center, h[valid])",  # as many elements as both have together
        pytest.param("F.l1_loss(F.dropout(h)[valid], h[valid])", marks=pytest.mark.slow),
        "self.norm(h)[valid].std(0) if valid.any() else h.sum(0)",  # a layer that counts its calls
    ],
)
def test_an_average_of_some_values_stays_as_it_was(form, project):
    before, after = fix_average(form, form.count("std"), project)
    given = torch.randn(6, 4), torch.arange(6) > 1
    for net in (before, after):
        torch.manual_seed(0)
        net.made = net(*given)[1]
    assert torch.allclose(before.made, after.made, rtol=1e-5)
    assert before.norm.num_batches_tracked == after.norm.num_batches_tracked


def test_an_average_that_is_infinite_stays_so(project):
    _, after = fix_average("(h[valid].abs() * 1e38 * 1e38).mean(0)", 0, project)
    assert torch.isinf(after(torch.randn(5, 4), torch.arange(5) < 3)[1]).all()
