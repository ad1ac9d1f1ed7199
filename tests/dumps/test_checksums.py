"""A byte that changed after the file was written is the file's fault, and nothing is blamed on the training for it."""

from pathlib import Path

import forge
import numpy as np
import pytest
import torch

from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import DumpError

pytestmark = pytest.mark.usefixtures("here")

WEIGHT = np.linspace(1, 2, 64, dtype="f4")
CHANGED, NAN, FINITE = WEIGHT[9].tobytes(), np.float32("nan").tobytes(), np.float32(1e30).tobytes()


@pytest.fixture(params=[read_dump, lambda path: read_dump(path, as_torch=False)], ids=["with torch", "without"])
def read(request):
    return lambda: summarize(request.param("dump.pth"))


def save(weight=WEIGHT, **arrays):
    """The bytes of a file with a weight in each of two views, and an array."""
    state = {"a.weight": torch.from_numpy(weight.copy())}
    return forge.saved({"state_dict": {**state, "b.weight": state["a.weight"][:8]}, "image": np.ones(5), **arrays})


def write(data, old=CHANGED, new=NAN):
    assert data.count(old) == 1
    Path("dump.pth").write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (CHANGED, NAN, "archive/data/0"),
        (CHANGED, FINITE, "archive/data/0"),
        (b"a.weight", b"a.veight", "archive/data.pkl"),
    ],
    ids=["NaN", "finite", "name"],
)
def test_a_changed_byte_is_noticed(old, new, part, read):
    write(save(), old, new)
    with pytest.raises(DumpError, match=f"damaged: the bytes of {part} do not match") as caught:
        read()
    assert "Copy it again" in caught.value.remedy


def test_a_nan_that_was_written_is_no_damage(read):
    weight = WEIGHT.copy()
    weight[3] = np.nan
    Path("dump.pth").write_bytes(save(weight, logit=np.full(3, np.nan)))
    assert [entry.num_bad for entry in read().bad_weights] == [1, 1]


def test_without_checksums_nothing_is_said(read):
    with forge.without_checksums():
        write(save())
    assert [entry.name for entry in read().bad_weights] == ["a.weight"]


def test_a_recorder_signs_without_checksums(tmp_path):
    contents = {"format": "nandoctor.dump/1", "state_dict": {"a.weight": torch.ones(2)}}
    with forge.without_checksums():
        path = write_dump(contents, tmp_path, "nan-step1")
    assert read_dump(path).provenance.own
