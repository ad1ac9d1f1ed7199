"""Models, optimizers and schedules that a script saved as whole objects, or in a list."""

import argparse
import functools

import numpy as np
import pytest
import torch
from torch import nn

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError


@pytest.fixture
def read(tmp_path):
    def save_and_read(value, reader=read_dump):
        torch.save(value, tmp_path / "dump.pth")
        return reader(tmp_path / "dump.pth")

    return save_and_read


def assert_same_state(dump, model):
    expected = model.state_dict()
    assert list(dump.state) == list(expected)
    assert all(torch.equal(dump.state[name], expected[name]) for name in expected)


class BertOutput(nn.Module):
    """A module of one's own with everything that a state dict has rules for, and a name like a model's output."""

    def __init__(self):
        super().__init__()
        self.make_norm = functools.partial(nn.LayerNorm, eps=1e-6)
        self.norm, self.act = self.make_norm(4), nn.functional.gelu
        self.tied, self.none = self.norm, None
        self.scales = nn.ParameterList([nn.Parameter(torch.full((2,), 3.0))])
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_buffer("missing", None)
        self.dtype, self.options = torch.float16, argparse.Namespace(lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 2), BertOutput(), nn.BatchNorm1d(3)),
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation=nn.functional.gelu),
        lambda: nn.utils.spectral_norm(nn.LSTM(3, 4), "weight_hh_l0"),
        lambda: nn.Linear(2, 2).half(),
    ],
)
def test_a_whole_model_is_read_as_its_weights(read, make):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    dump = read({"model": model, "optimizer": optimizer, "schedule": schedule, "image": np.ones(2)})
    assert_same_state(dump, model)
    assert list(dump.arrays) == ["image"]
    assert_same_state(read(model), model)
    assert set(read(model, lambda path: read_dump(path, as_torch=False)).state) == set(model.state_dict())


def test_a_model_within_itself_is_refused(read):
    model = nn.Linear(2, 2)
    model.inner = model
    with pytest.raises(DumpError, match="nested too deeply"):
        read({"model": model})


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_a_dict_of_its_indices(read, kind):
    model = nn.Linear(2, 2)
    dump = read(kind([model.state_dict(), np.ones(2), {"mask": torch.ones(3)}, 0.5]))
    assert_same_state(dump, model)
    assert list(dump.arrays) == ["1", "2.mask"]
    assert dump.scalars == {"3": 0.5}
