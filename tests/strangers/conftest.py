"""How a stranger is examined: its step is saved to a file, and the file is replayed."""

from __future__ import annotations

import pytest
import torch

import nandoctor


@pytest.fixture(autouse=True)
def same_weights():
    """Weights that do not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["diagnosed", "with fixes"])
def examine(request, tmp_path):
    """A function (model, batch, **options) -> report; the search for fixes, most of the work, is left to `-m slow`."""

    def examine(model, batch, **options):
        path = tmp_path / "dump.pth"
        torch.save({"state_dict": model.state_dict(), **batch}, path)
        options = {"mode": "train", "fixes": request.param, **options}
        report = nandoctor.replay(path, model=model, **options).report
        verified = [item for item in report.fixes if item.verified]
        assert all(item.outcome.finite and item.title and (item.patch or item.settings) for item in verified)
        assert all(check.status != "failed" for item in verified for check in item.checks)
        return report

    return examine
