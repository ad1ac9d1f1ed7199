"""The snippet that keeps modules in fp32: pasted at the top level of a file, and what is made of the model after it."""

import copy
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch import nn

from nandoctor.changes.keep_fp32 import modules_in_fp32

X = torch.ones(2, 4)


@pytest.fixture
def model(monkeypatch):
    """Two layers, of which the second is kept, alone and in the whole."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monkeypatch.setitem(sys.modules, "pasted", module := ModuleType("pasted"))
    vars(module)["model"] = model
    exec(modules_in_fp32(["1", ""], has_low_weights=False, device="cpu").text, vars(module))
    return model


def compute(model, x=X):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(x)
        assert torch.is_autocast_enabled("cpu")
        return made


def reloaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_a_copy_computes_with_its_own_weights(model, copied):
    before, other = compute(model), copied(model)
    nn.init.zeros_(model[1].weight)
    torch.testing.assert_close(compute(other), before, rtol=0, atol=0)
    assert before.dtype == compute(other[1], X.bfloat16()).dtype == torch.float32


def test_autocast_is_as_it_was_after_an_exception(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError):
            model[1](X[:, :3])
        assert torch.is_autocast_enabled("cpu")
        assert torch.mm(X, X.T).dtype == torch.bfloat16


def test_each_thread_has_its_own_autocast(model):
    with ThreadPoolExecutor(4) as threads:
        assert {made.dtype for made in threads.map(lambda _: compute(model), range(16))} == {torch.float32}
