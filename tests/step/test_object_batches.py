"""Batches that are no plain containers come back with their fields, from the recorder's files and from others."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import nandoctor
from nandoctor.dumps.packing import fill, pack
from nandoctor.errors import NanDoctorError

X = torch.linspace(-1, 1, 12).reshape(4, 3)
CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "n"])


@dataclass
class Record:
    x: torch.Tensor
    n: int = 2


class Slotted:
    __slots__ = ("n", "x")

    def __init__(self):
        self.x, self.n = X, 2


class Graph:
    """A batch that has keys and is no mapping, as those of graph libraries; it refers to itself."""

    def __init__(self):
        self._store = {"x": X, "n": 2}
        self.me = self

    def keys(self):
        return list(self._store)

    def __getitem__(self, name):
        return self._store[name]


def through_the_file(value):
    """A value as a recorder packs it and a replay fills it."""
    packed = pack(value, "batch", kinds=True)
    return fill(packed.tree, {}, CPU), packed.notes


@pytest.mark.parametrize(
    "value", [Record(X), Slotted(), Graph(), SimpleNamespace(x=X, n=2)], ids=lambda value: type(value).__name__
)
def test_an_object_comes_back_with_its_fields(value):
    made, notes = through_the_file(value)
    assert torch.equal(made.x, X)
    assert (made.n, made["n"], made.to("cuda") is made, notes) == (2, 2, True, ())
    with pytest.raises(AttributeError, match=r"no 'edges' of this object, only its fields: .*x"):
        _ = made.edges


class Averages(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.mean())


class Molecule(SimpleNamespace):
    def mean(self):
        return self.atoms / self.degrees


def test_a_method_of_the_batch_needs_a_call(tmp_path):
    model, batch = Averages(3, 3), Molecule(atoms=X, degrees=torch.zeros(4, 1))
    with nandoctor.Recorder(model, folder=tmp_path) as recorder:
        recorder.watch(model(batch).mean(), batch)
    with pytest.raises(NanDoctorError, match="the dump has no 'mean' of this object, only its fields") as caught:
        nandoctor.replay(recorder.written[0], model=lambda: Averages(3, 3))
    assert "--call" in caught.value.remedy


def test_a_key_of_the_batch_names_no_class():
    packed = pack({"x": X, "<type>": "subprocess.Popen"}, "batch", kinds=True)
    assert (packed.tree.keys(), len(packed.notes)) == ({"x"}, 1)


def test_named_tuples_and_packed_sequences_come_back_as_such():
    made, notes = through_the_file([Pair(X, 2), pack_sequence([X, X[:2]])])
    x, n = made[0]
    assert (x is not None, made[0].n, n, notes) == (True, 2, 2, ())
    assert isinstance(made[1], torch.nn.utils.rnn.PackedSequence)
    assert made[1].batch_sizes.tolist() == [2, 2, 1, 1]


class Reads(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x) * 1e7


class Packs(nn.LSTM):
    def forward(self, words):
        return super().forward(words)[0].data * 1e7


@pytest.mark.parametrize(
    ("model", "saved"),
    [
        (Reads(3, 3), {"batch": SimpleNamespace(x=X, n=2)}),
        (Reads(3, 3), {"batch": UserDict(x=X)}),
        (Packs(3, 4), {"words": pack_sequence([X, X[:2]])}),
    ],
)
def test_a_plain_dump_holds_them(replay, model, saved):
    report = replay(model, saved, mode="train", fixes=False)
    assert (report.verdict, report.origin.op) == ("precision", "mul")
    assert report.notes[0].startswith(f"Replayed as model({next(iter(saved))})")
