"""Weights from checkpoints as other programs write them: the same ones come back, and parts are refused."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.weights import read_weights
from nandoctor.errors import DumpError


class Net(nn.Module):
    """A norm with buffers between two layers."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.bfloat16)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return Net().state_dict()


def same(found, state):
    return list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)


def save_shards(folder, state, save, ending):
    """Two shards and their index, as transformers writes them."""
    names = list(state)
    places = {name: f"model-0000{1 + (i > 3)}-of-00002.{ending}" for i, name in enumerate(names)}
    for file in set(places.values()):
        save({name: state[name] for name in names if places[name] == file}, folder / file)
    stem = "pytorch_model" if ending == "bin" else "model"
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write(kind, folder, state):
    """A checkpoint of this kind; what to pass for it."""
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif kind == "index of safetensors":
        save_shards(folder, state, save_file, "safetensors")
    elif kind == "index of bin":
        save_shards(folder, state, torch.save, "bin")
    elif kind == "deepspeed":
        torch.save({"module": state, "ds_version": "0.16"}, folder / "mp_rank_00_model_states.pt")
        return folder / "mp_rank_00_model_states.pt"
    else:
        torch.save(state, folder / "state.pt")
        return folder / "state.pt"
    return folder


KINDS = ("safetensors", "index of safetensors", "index of bin", "deepspeed", "state dict")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_back_its_weights(kind, tmp_path, state):
    found = read_weights(write(kind, tmp_path, state))
    assert same({name: found[name] for name in state}, state)
    assert found.keys() == state.keys()


def test_a_checkpoint_is_mapped_and_never_written_to(tmp_path, state):
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    before = path.read_bytes()
    read_weights(path)["enter.weight"].fill_(7)
    assert path.read_bytes() == before


def test_a_directory_of_dumps_is_told_from_a_file(tmp_path):
    folder = tmp_path / "some folder"
    folder.mkdir()
    with pytest.raises(DumpError, match="a directory, not a file") as caught:
        read_dump(folder)
    assert f"nandoctor triage '{folder}'" in caught.value.remedy
    assert "zero_to_fp32" in caught.value.remedy


def index_of(weight_map):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))


BROKEN = {
    "nothing": (lambda _: None, "a directory, not a file"),
    "index: not json": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "weight_map"),
    "index: other folder": (index_of({"weight_map": {"a": "../../secret.bin"}}), "weight_map"),
    "index: no file": (index_of({"weight_map": {"a": "model.safetensors"}}), "not beside it"),
    "index: endless": (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "weight_map"),
    "safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(20)), "damaged"),
    "safetensors: pipe": (lambda f: os.mkfifo(f / "model.safetensors"), "a pipe"),
    "safetensors: empty": (lambda f: save_file({}, f / "model.safetensors"), "no weights"),
    "index: pipe": (lambda f: os.mkfifo(f / "model.safetensors.index.json"), "a pipe"),
    "index: empty": (index_of({"weight_map": {}}), "no weights"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_has_one_clear_error(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, message = BROKEN[kind]
    make(tmp_path)
    with pytest.raises(DumpError) as caught:
        read_weights(tmp_path)
    assert message in caught.value.message
