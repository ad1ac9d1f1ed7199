"""Outputs that are no plain containers: what is non-finite in them is found, and nothing is healthy unseen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nandoctor
from strangers.visits import blamed, normal


class Answer:
    """What a model returns where a dict would do."""

    def __init__(self, logits):
        self.logits = logits


class Head(nn.Module):
    """Scales its output until fp16 overflows, if it is sick, and hands it over in a container."""

    def __init__(self, wrap, *, sick):
        super().__init__()
        self.score, self.wrap, self.scale = nn.Linear(8, 8), wrap, 1e6 if sick else 1.0

    def forward(self, x):
        return self.wrap(self.score(x) * self.scale)


BATCH = {"x": normal(4, 8)}
READ = {
    "distribution": lambda logits: torch.distributions.Normal(logits, 1.0, validate_args=False),
    "object": Answer,
    "csr": lambda logits: logits.float().to_sparse_csr(),
    "coo": lambda logits: logits.float().to_sparse(),
    "numpy": lambda logits: {"logits": logits.detach().numpy()},
    "closure": lambda logits: {"later": lambda: logits},
    "defaults": lambda logits: {"later": lambda held=logits: held},
}
UNREAD = {
    "generator": lambda logits: ({"row": row} for row in logits),
    "iterator": lambda logits: {"rows": iter(logits)},
    "masked": lambda logits: torch.masked.masked_tensor(logits, torch.ones_like(logits).bool()),
}
QUIETLY = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of MaskedTensors")


@QUIETLY
@pytest.mark.parametrize("name", READ)
def test_an_overflow_in_a_container_is_found(examine, name):
    report = examine(Head(READ[name], sick=True), BATCH, fixes=False)
    assert blamed(report)[:3] == ("precision", "", "mul")


@QUIETLY
@pytest.mark.parametrize("name", READ)
def test_a_finite_container_is_healthy(examine, name):
    assert blamed(examine(Head(READ[name], sick=False), BATCH)) == ("healthy",)


@QUIETLY
@pytest.mark.parametrize("name", UNREAD)
def test_an_overflow_in_what_cannot_be_read_is_found(examine, name):
    report = examine(Head(UNREAD[name], sick=True), BATCH, fixes=True)
    assert blamed(report)[:3] == ("precision", "", "mul")
    assert not report.fixes
    assert "No fix was tried" in report.search_notes[-1]


@QUIETLY
@pytest.mark.parametrize("name", UNREAD)
def test_nothing_is_healthy_that_was_not_read(examine, name):
    report = examine(Head(UNREAD[name], sick=False), BATCH)
    assert report.verdict == "cannot-tell"
    assert "cannot be inspected" in report.headline


def test_what_a_model_keeps_to_itself_is_looked_at(examine):
    class Keeping(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x) * self.factor

    Keeping.factor = 1.0
    report = examine(Keeping(8, 8), BATCH)
    assert report.verdict == "cannot-tell"
    assert "returned no floating-point values" in report.headline
    Keeping.factor = 1e6
    assert blamed(examine(Keeping(8, 8), BATCH))[:3] == ("precision", "", "mul")
    heard = examine(Keeping(8, 8), BATCH, call=lambda model, batch: (model(batch["x"]), model.kept))
    assert blamed(heard)[:3] == ("precision", "", "mul")


def test_a_nan_that_came_to_nothing_is_no_failure(examine):
    class Cleaned(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            return iter(torch.nan_to_num((made - made) / (made - made)))

    assert examine(Cleaned(8, 8), BATCH).verdict == "cannot-tell"


@pytest.mark.parametrize(
    ("saved", "verdict"),
    [
        ({"loss": float("nan")}, "cannot-tell"),
        ({"train_loss": torch.tensor(float("inf"))}, "cannot-tell"),
        ({"loss": 0.5}, "healthy"),
        ({"loss_scale": float("inf")}, "healthy"),
    ],
)
def test_a_saved_loss_that_cannot_be_replayed(examine, saved, verdict):
    assert examine(nn.Linear(8, 8), {**BATCH, **saved}).verdict == verdict


def test_a_saved_loss_that_does_not_come_back(examine):
    report = examine(nn.Linear(8, 8), {**BATCH, "loss": float("nan")}, loss=lambda output, _: output.mean())
    assert report.verdict == "not-reproduced"


def test_check_cannot_tell_where_the_loss_is_missing(tmp_path, capsys):
    from nandoctor.cli import main

    model = nn.Linear(8, 8)
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(8, 8)\n")
    torch.save({"state_dict": model.state_dict(), **BATCH, "loss": float("nan")}, tmp_path / "dump.pth")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "dump.pth"), "--model", f"{tmp_path}/net.py:make", "--check"])
    assert ended.value.code == 125
    assert "loss was NaN" in capsys.readouterr().err
    case = nandoctor.replay(tmp_path / "dump.pth", model=model)
    assert (case.verdict, case.finite) == ("cannot-tell", False)
