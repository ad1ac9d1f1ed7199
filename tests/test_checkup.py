"""A healthy step measured before the accident: where its values are."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import nandoctor
from nandoctor.cli import main
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import BF16, FP8_E4M3, FP16
from nandoctor.views.checkup import describe_checkup

GAIN = 3000.0


class Attention(nn.Module):
    """(N, L, 8) to (N, L, 8): its scores are made between its submodules, and its softmax runs in fp32."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return torch.softmax(scores.float() * 1e6 / 1e6, dim=-1) @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.attention, self.head = nn.Linear(8, 8), Attention(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.attention(self.enter(x)))


def save(folder, *, gain=1.0, name="step.pth", **arrays):
    torch.manual_seed(0)
    state = Net().state_dict()
    state["attention.query.weight"] = state["attention.query.weight"] * gain
    torch.save({"state_dict": state, **arrays}, folder / name)
    return folder / name


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, 6, 8)


def layer(checked, name):
    return next(found for found in checked.layers if found.module == name)


def test_values_between_modules_are_measured(tmp_path, x):
    checked = nandoctor.checkup(save(tmp_path, gain=GAIN, x=x), Net)
    values = layer(checked, "attention")
    net = Net()
    net.load_state_dict(torch.load(tmp_path / "step.pth")["state_dict"])
    with torch.no_grad():
        entered = net.enter(x)
        query = net.attention.query(entered)
        scores = query @ net.attention.key(entered).transpose(-2, -1)
    assert values.absmax == pytest.approx(max(float(query.abs().max()), float(scores.abs().max())), rel=1e-3)
    assert values.fit_in(FP16).headroom_bits == pytest.approx(math.log2(65504 / values.absmax))
    assert "test_checkup.py:" in layer(checked, "attention").largest_at


def test_what_autocast_keeps_in_fp32_has_room(tmp_path, x):
    """The scores times 1e6 are past fp16, and never in it."""
    checked = nandoctor.checkup(save(tmp_path, x=x), Net)
    assert layer(checked, "attention").fit_in(FP16).fit == "fits"


def test_an_overflow_to_come_is_told(tmp_path, x):
    checked = nandoctor.checkup(save(tmp_path, gain=1e6, x=x), Net)
    values = layer(checked, "attention")
    assert (values.fit_in(FP16).fit, values.fit_in(BF16).fit, values.fit_in(FP8_E4M3).fit) == (
        "overflows",
        "fits",
        "overflows",
    )
    assert not checked.run_finite


class Masked(Net):
    """Fills with the end of the format that the values have, another number in fp32 than in fp16."""

    def forward(self, x):
        entered = self.enter(x)
        mask = torch.zeros_like(entered).masked_fill(x > 0, torch.finfo(entered.dtype).min / 2)
        return self.head(torch.softmax(entered + mask, dim=-1))


def test_a_mask_of_the_format_is_no_overflow(tmp_path, x):
    checked = nandoctor.checkup(save(tmp_path, x=x), Masked)
    assert all(found.fit_in(FP16).fit == "fits" for found in checked.layers)


def test_a_directory_of_weights_is_checked_with_a_batch(tmp_path, x):
    batch = save(tmp_path, x=x, name="batch.pth")
    (tmp_path / "hf").mkdir()
    torch.save(torch.load(save(tmp_path, gain=2.0))["state_dict"], tmp_path / "hf" / "pytorch_model.bin")
    checked, same = (nandoctor.checkup(tmp_path / name, Net, batch=batch) for name in ("hf", "step.pth"))
    assert checked.path == str(tmp_path / "hf")
    assert checked.layers == same.layers


def test_a_step_that_failed_is_for_replay(tmp_path, x):
    with pytest.raises(NanDoctorError, match="not healthy") as caught:
        nandoctor.checkup(save(tmp_path, gain=float("nan"), x=x), Net)
    assert "nandoctor replay" in caught.value.remedy


class LosesEps(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h / ((h * h).mean(-1, keepdim=True) + 1e-9).sqrt()


def test_a_step_that_fp16_fails_within_its_range(tmp_path):
    model = LosesEps(4, 4, bias=False)
    torch.save({"state_dict": model.state_dict(), "x": torch.zeros(2, 4)}, tmp_path / "step.pth")
    headline = describe_checkup(nandoctor.checkup(tmp_path / "step.pth", LosesEps(4, 4, bias=False)))
    assert headline.startswith("The step is non-finite under fp16 autocast, though")


def test_weights_alone_ask_for_a_batch(tmp_path):
    with pytest.raises(NanDoctorError, match="no batch") as caught:
        nandoctor.checkup(save(tmp_path), Net)
    assert "--batch" in caught.value.remedy


def test_the_command_prints_and_writes(tmp_path, x, monkeypatch):
    save(tmp_path, x=x)
    (tmp_path / "net_of_the_test.py").write_text("from test_checkup import Net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    arguments = ["checkup", "step.pth", "--model", "net_of_the_test.py:Net"]
    shown = CliRunner().invoke(main, [*arguments, "-o", "checkup.html"])
    assert shown.exit_code == 0
    assert "fp16 holds every value" in shown.stdout
    assert '<td class="text">attention</td>' in (tmp_path / "checkup.html").read_text()
    plain = CliRunner().invoke(main, [*arguments, "--json"])
    assert json.loads(plain.stdout)["schema"] == "nandoctor.checkup/2"
