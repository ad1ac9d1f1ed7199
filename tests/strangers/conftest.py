"""How a stranger is examined: its step is saved to a file, and the file is replayed."""

from __future__ import annotations

import pytest
import torch

import nandoctor


@pytest.fixture(autouse=True)
def same_weights():
    """Weights that do not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def examine(tmp_path):
    """A function (model, batch, **options) -> report."""

    def examine(model, batch, **options):
        path = tmp_path / "dump.pth"
        torch.save({"state_dict": model.state_dict(), **batch}, path)
        return nandoctor.replay(path, model=model, **{"mode": "train", **options}).report

    return examine
