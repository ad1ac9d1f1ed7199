"""Reading nandoctor.dump/1: nothing in such a file is believed before it was checked."""

import pytest
import torch

from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

IMAGE = torch.ones(2, 3)
WORDS = torch.zeros(624, dtype=torch.int64)
BEYOND = torch.Generator().manual_seed(0).get_state()  # of which 624 words are left after the second one
BEYOND[8:24] = torch.tensor([624, 1, 2, 0], dtype=torch.int32).view(torch.uint8)


def contents(**changes):
    return {
        "format": "nandoctor.dump/1",
        "event": {"step": 7, "reason": "loss", "loss": float("nan"), "epoch": None},
        "state_dict": {"weight": torch.ones(3)},
        "calls": [{"names": ["x"], "args": (IMAGE,), "kwargs": {"scale": 2.0}}],
        "batch": [IMAGE, torch.zeros(2)],
        "output": {"logit": torch.full((2, 1), float("nan"))},
        "training": {"": True},
        "rng": {"torch": torch.get_rng_state()},
        "autocast": {"enabled": True, "device": "cuda", "dtype": "float16"},
        "scaler": {"scale": 1024.0},
        "left_out": ["batch.2: a generator"],
        **changes,
    }


def read(tmp_path, **changes):
    torch.save(contents(**changes), tmp_path / "dump.pth")
    return read_dump(tmp_path / "dump.pth")


def test_everything_has_its_place(tmp_path):
    dump = read(tmp_path, update={"optimizer": "Adam", "parameters": {}})
    assert dump.recorded.update is None  # it spoiled no weights
    assert list(dump.arrays) == ["input.x", "batch.1", "output.logit"]
    assert dump.recorded.batch[0].name == "input.x"
    assert dump.scalars.keys() == {"step", "reason", "loss", "scaler.scale"}
    assert (dump.layout, dump.recorded.autocast.dtype, len(dump.rng_states)) == ("nandoctor.dump/1", "float16", 1)
    assert dump.missing == ("batch.2: a generator",)
    assert summarize(dump).missing == ("The recorder could not keep batch.2: a generator.",)


def test_a_file_without_weights_says_so_with_an_empty_state_dict(tmp_path):
    saved = {"format": "nandoctor.dump/1", "state_dict": {}}
    torch.save(saved, tmp_path / "dump.pth")
    assert read_dump(tmp_path / "dump.pth").recorded.model is None
    del saved["state_dict"]
    torch.save(saved, tmp_path / "dump.pth")
    with pytest.raises(DumpError, match="has no state dict"):
        read_dump(tmp_path / "dump.pth")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "nandoctor.dump/2"}, "nandoctor.dump/2, which this version does not know"),
        ({"state_dict": [1]}, "state_dict should be an object, not a list of 1"),
        ({"calls": {"x": IMAGE}}, "calls should be a list, not an object"),
        ({"calls": [3]}, r"dump\.calls\[0\] should be an object, not 3"),
        ({"calls": [{"args": {"x": IMAGE}}]}, r"dump\.calls\[0\]\.args should be a list, not an object"),
        ({"training": {IMAGE: True}}, r"a key of dump\.training should be a string, not a value of type "),
        (
            {"model": {"name": "Net", "arguments": {"config": {"<type>": {"file": 3}, "config": {}}}}},
            "<type>.file should be a string, not 3",
        ),
        (
            {"mixed_precision": {"inputs": {"": [1]}}},
            r"mixed_precision\.inputs\[''\] should be one of float16, .* not a list of 1",
        ),
        ({"training": {"": 1}}, r"training\[''\] should be true or false, not 1"),
        ({"autocast": {"enabled": "yes"}}, r"autocast\.enabled should be true or false, not 'yes'"),
        ({"model": "train.py:Net"}, "model should be an object, not 'train.py:Net'"),
        ({"model": {"name": 3}}, r"model\.name should be a string, not 3"),
        ({"batch": {"x": {1, 2}}}, "'batch.x' is a set"),
        ({"rng": {"numpy": {"keys": "abc"}}}, "has no 'keys' of 624 words"),
        ({"rng": {"python": {"words": 3}}}, "has no 'words' of 625 words"),
        ({"rng": {"numpy": {"position": 3}}}, "has no 'keys' of 624 words"),
        ({"rng": {"python": {"words": torch.zeros(3)}}}, "has no 'words' of 625 words"),
        *(({"rng": {"numpy": {"keys": WORDS, "position": at}}}, "state of numpy's random") for at in (-1, 625)),
        ({"rng": {"torch": BEYOND}}, "state of torch's random"),
    ],
)
def test_what_is_not_as_the_format_says_is_refused(tmp_path, changes, message):
    with pytest.raises(DumpError, match=message) as caught:
        read(tmp_path, **changes)
    assert caught.value.remedy


def test_a_tree_without_end_is_refused(tmp_path):
    tree = IMAGE
    for _ in range(80):
        tree = [tree]
    with pytest.raises(DumpError, match="nested too deeply"):
        read(tmp_path, batch=tree)


def test_a_word_of_the_format_in_a_plain_dump_is_no_claim(tmp_path):
    torch.save({"format": "png", "state_dict": {"weight": IMAGE}, "image": IMAGE}, tmp_path / "dump.pth")
    dump = read_dump(tmp_path / "dump.pth")
    assert (dump.layout, dump.scalars, dump.is_recorded) == ("plain", {"format": "png"}, False)
