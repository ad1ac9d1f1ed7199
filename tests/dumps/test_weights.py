"""Weights from checkpoints as other programs write them; names of arrays, and what they usually mean."""

import os

import pytest
import torch
from one_test import for_each
from safetensors.torch import save_file
from torch import nn

from nandoctor.dumps.classify import is_bookkeeping, is_random_state, role_of
from nandoctor.dumps.reader import read_dump, read_weights
from nandoctor.errors import DumpError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.bfloat16)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return Net().state_dict()


def same(found, state):
    return list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)


def save_shards(folder, state, save, stem):
    names = list(state)
    for index, part in enumerate((names[:3], names[3:]), 1):
        save({name: state[name] for name in part}, folder / stem.replace("*", f"0000{index}-of-00002"))


def write(kind, folder, state):
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif kind == "shards of safetensors":
        save_shards(folder, state, save_file, "model-*.safetensors")
    elif kind == "shards of bin":
        save_shards(folder, state, torch.save, "pytorch_model-*.bin")
    elif kind == "deepspeed":
        torch.save({"module": state, "ds_version": "0.16"}, folder / "mp_rank_00_model_states.pt")
        return folder / "mp_rank_00_model_states.pt"
    else:
        torch.save(state, folder / "state.pt")
        return folder / "state.pt"
    return folder


KINDS = ("safetensors", "shards of safetensors", "shards of bin", "deepspeed", "state dict")


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


def other_shards(*names):
    return lambda folder: [save_file({"weight": torch.ones(2)}, folder / f"model-{name}.safetensors") for name in names]


BROKEN = {
    "nothing": (lambda _: None, "a directory, not a file"),
    "shards: one is missing": (other_shards("00001-of-00002"), "it has 1 shards"),
    "shards: of two checkpoints": (other_shards("00001-of-00001", "00001-of-00002"), "it has 2 shards"),
    "shards: the same twice": (other_shards("00001-of-00002", "00002-of-00002"), "it has 2 shards"),
    "safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(20)), "damaged"),
    "safetensors: long": (lambda f: (f / "model.safetensors").write_bytes(b"\0\0\0\2" + bytes(9)), "claims 33.6 MB"),
    "safetensors: pipe": (lambda f: os.mkfifo(f / "model.safetensors"), "a pipe"),
    "safetensors: empty": (lambda f: save_file({}, f / "model.safetensors"), "no weights"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_has_one_clear_error(kind, here):
    make, message = BROKEN[kind]
    make(here)
    with pytest.raises(DumpError) as caught:
        read_weights(here)
    assert message in caught.value.message


ROLES = {
    "input": """image images img x input inputs input_ids pixel_values attention_mask batch.image inputs.mask image_0 X
        inputImage input_image src samples.3""",
    "target": """mask masks target targets.0.boxes label labels y gt gt_boxes batch.mask target_image y_true image_mask
        teacher_labels""",
    "output": """logit logits outputs.logits pred preds y_hat y_pred out pred_boxes mask_logits outputs.mask
        predicted_mask last_hidden_state logit1""",
    "unknown": """foo loss weight z heat xy yaw my_x checkpoint 7 0.1 outlook imagery""",
}


@for_each([(name, role) for role, names in ROLES.items() for name in names.split()], star=True)
def test_role_of_a_name(name, role):
    assert role_of(name) == role


def test_bookkeeping():
    names = "optimizer optimizer_state_dict optimizerG optim lr_schedulers callbacks rng_state train.rng"
    assert all(map(is_bookkeeping, names.split()))
    assert not is_bookkeeping("1" * 200_000 + "a")  # each letter is looked at once
    assert not any(map(is_bookkeeping, "image optimal_flow schedule_mask orange scaler string".split()))
    assert not is_random_state("orange")
