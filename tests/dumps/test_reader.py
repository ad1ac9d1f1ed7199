"""Honest files: every way in which training scripts write a failing step, or only its weights."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
import uuid

import forge
import numpy as np
import pytest
import torch
from torch import nn

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

WEIGHTS = {"encoder.weight": torch.arange(6.0).reshape(2, 3), "encoder.bias": torch.tensor([1.0, float("nan")])}


@pytest.fixture
def read(tmp_path):
    def save_and_read(value, **options):
        path = tmp_path / "dump.pth"
        path.write_bytes(value if isinstance(value, bytes) else forge.saved(value, **options))
        return read_dump(path)

    return save_and_read


def assert_same_state(state, expected=WEIGHTS):
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, equal_nan=True)
        assert type(state[name]) is torch.Tensor
        assert not state[name].requires_grad


def test_the_plain_dump_of_a_training_script(read):
    step = forge.step()
    dump = read(step)

    assert dump.layout == "plain"
    assert dump.state_name == "state_dict"
    assert (dump.left_out, dict(dump.scalars)) == ((), {})
    assert_same_state(dump.state, step["state_dict"])
    assert list(dump.arrays) == ["image", "mask", "logit"]
    for name, tensor in dump.arrays.items():
        np.testing.assert_array_equal(tensor.numpy(), step[name])
        assert tensor.numpy().dtype == step[name].dtype
    assert dump.nbytes == dump.path.stat().st_size


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">f8").reshape(2, 3, 4),
        np.arange(24, dtype=">i2").reshape(2, 3, 4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(6.0)[::-2],
        np.broadcast_to(np.float16(2), (3, 2)),
        np.zeros((0, 3), "f4"),
        np.arange(3, dtype="u2"),
        np.arange(3, dtype="u8"),
        np.array([True, False]),
        np.array([1 + 2j, np.nan], "c8"),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_arrays_of_every_memory_layout(array, read):
    tensor = read({"state_dict": WEIGHTS, "image": array}).arrays["image"]
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
    tensor.zero_()  # the memory is the tensor's own


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, dtype=torch.float16),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.uint16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 3, 4).permute(2, 0, 1),
        torch.ones(1).expand(5),
        torch.ones(3, requires_grad=True) * 2,
        nn.Parameter(torch.ones(3)),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.layout}{'p' * isinstance(tensor, nn.Parameter)}",
)
def test_tensors_of_every_kind(tensor, read):
    read_back = read({"state_dict": WEIGHTS, "image": tensor}).arrays["image"]
    assert type(read_back) is torch.Tensor
    assert (read_back.dtype, read_back.shape, read_back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(read_back.to_dense().cfloat(), tensor.detach().to_dense().cfloat())


@pytest.mark.parametrize("least", [1, 1 << 28], ids=["large", "small"])
def test_large_archives_are_mapped_and_others_copied(read, tmp_path, monkeypatch, least):
    monkeypatch.setattr("nandoctor.dumps.file_type._MAPPED_NBYTES", least)
    dump = read({"state_dict": WEIGHTS, "image": torch.ones(1 << 20)})
    with (tmp_path / "dump.pth").open("r+b") as file:
        content = file.read()
        file.seek(content.index(np.ones(1024, "f4").tobytes()) + 4096)
        file.write(np.full(1, 7, "f4").tobytes())
    assert (7 in dump.arrays["image"]) == (least == 1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (49, {"value": 49}),
        (True, {"value": True}),
        ("first\nsecond", {"value": "first\nsecond"}),
        (None, {"value": None}),
        (np.float32("nan"), {"value": pytest.approx(np.nan, nan_ok=True)}),
        (np.array(2.5, ">f8"), {"value": 2.5}),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), {"value": 0.5}),
        (torch.float16, {"value": "torch.float16"}),
        ({"scale": 65536.0, "growth_factor": 2.0}, {"value.scale": 65536.0, "value.growth_factor": 2.0}),
        (np.int64(3), {"value": 3}),
        (np.bool_(True), {"value": True}),
        (torch.tensor(0.5).to(torch.float8_e4m3fn), {"value": 0.5}),
    ],
)
def test_plain_values_and_zero_dimensional_arrays_are_numbers(value, told, read):
    assert read({"state_dict": WEIGHTS, "scheduler": None, "value": value}).scalars == told


def test_values_that_are_shared_many_times_are_no_bomb(read):
    record = {"file": "tile_" * 100, "box": (1, (2, 3))}
    dump = read({"model": WEIGHTS, "classes": ["a long name of a class" * 9] * 10_000, "records": [record] * 1_000})
    assert len(dump.scalars["classes"]) == 10_000
    assert dump.scalars["records.999.file"] == "tile_" * 100


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.array(["a.png", "b.png"]), "an array of U5"),
        (np.zeros(2, [("a", "f4")]), "an array of V4"),
        (np.array(["2024-01-01"], "M8[D]"), "an array of M8"),
        (np.array([1, None, "x"], object), "an array of O8"),
        (b"bytes", "a bytes"),
    ],
)
def test_arrays_that_are_no_numbers_are_named_and_left_out(value, told, read):
    dump = read({"state_dict": WEIGHTS, "value": value})
    assert (dict(dump.arrays), dump.left_out) == ({}, (f"value ({told})",))


@pytest.mark.parametrize(
    ("saved", "state_name"),
    [
        (WEIGHTS, ""),
        (collections.OrderedDict(WEIGHTS), ""),
        ({"model": WEIGHTS}, "model"),
        ({"model_state_dict": WEIGHTS, "epoch": 3}, "model_state_dict"),
        ({"net": WEIGHTS}, "net"),
        ({"checkpoint": {"generator": WEIGHTS}}, "checkpoint.generator"),
        ({"model": {k: v.numpy() for k, v in WEIGHTS.items()}}, "model"),
        ({"model": {k: nn.Parameter(v) for k, v in WEIGHTS.items()}}, "model"),
        ({"ema": {"module": WEIGHTS, "updates": 3}}, "ema.module"),
    ],
)
def test_weights_alone(saved, state_name, read):
    dump = read(saved)
    assert dump.layout == "weights-only"
    assert dump.state_name == state_name
    assert not dump.arrays
    assert_same_state(dump.state)


def test_one_flat_dict_is_told_apart_by_names(read):
    dump = read({**WEIGHTS, "epoch": 3, "steps": torch.ones(()), "image": torch.ones(1), "logit": torch.ones(1)})
    assert (dump.layout, [*dump.arrays]) == ("plain", ["image", "logit"])
    assert_same_state(dump.state)


def test_trained_weights_come_before_averages_and_other_nets(read):
    average = {name: tensor * 0 for name, tensor in WEIGHTS.items()}
    dump = read(
        {"ema": {"module": average}, "criterion": {"a.weight": torch.ones(1)}, "model": WEIGHTS, "last_epoch": 2}
    )
    assert dump.state_name == "model"
    assert dump.left_out == ("ema.module", "criterion")
    assert_same_state(dump.state)


def test_an_optimizer_is_known_by_its_state_under_any_name(read):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    dump = read({"model": WEIGHTS, "solver": optimizer.state_dict(), "rng_state": torch.get_rng_state()})
    assert dump.left_out == ("solver",)
    assert [state.numel() for state in dump.rng_states] == [torch.get_rng_state().numel()]


def test_random_states_may_be_in_a_dict(read):
    states = {"torch": torch.get_rng_state(), "numpy": ("MT19937", np.zeros(624, np.uint32), 0), "python": (3, (1, 2))}
    dump = read({"model": WEIGHTS, "rng_state": states})
    assert torch.equal(dump.rng_states[0], torch.get_rng_state())
    assert dump.left_out == ("rng_state.numpy", "rng_state.python")


@pytest.mark.parametrize(
    "saved",
    [
        {"batch": {"image": torch.ones(1, 3), "weight": torch.ones(1), "x": torch.ones(2)}},
        {"meter_state_dict": {"sum": torch.ones(2), "count": 3}},
    ],
)
def test_what_is_no_state_dict_is_a_batch(saved, read):
    ((name, held),) = saved.items()
    dump = read({"model": WEIGHTS, **saved})
    assert [*dump.arrays, *dump.scalars] == [f"{name}.{key}" for key in held]


class Mode(enum.Enum):
    TRAIN = 1


@dataclasses.dataclass
class Options:
    lr: float
    mode: Mode
    weights: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    lr: float = 0.5


class Node(dict):
    """A configuration whose items are attributes, as those of many libraries."""


def test_what_scripts_save_beside_the_batch_is_read(read):
    saved = {
        **forge.step(),
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("/runs/a"), layers=[1, 2]),
        "cfg": Options(lr=0.2, mode=Mode.TRAIN, weights=torch.ones(3)),
        "node": Node(width=4, deep=Node(depth=2)),
        "slots": Slotted(),
        "history": collections.defaultdict(list, loss=[0.5]),
        "last": collections.deque([1.0, 2.0], maxlen=5),
        "when": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
        "id": uuid.UUID(int=7),
        "counts": collections.defaultdict(int, seen=3),
        "formats": [int, str, np.float16, bool, np.random.default_rng(0), random.Random(0), decimal.Decimal("1.5")],
        "keys": {0.5: frozenset({"encoder"}), None: 2, Mode.TRAIN: 5, "v": torch.__version__, "b": bytearray(b"b")},
    }
    dump = read(saved)
    assert list(dump.arrays) == ["image", "mask", "logit", "cfg.weights"]
    told = {name: value for name, value in dump.scalars.items() if value is not None}
    assert told == {
        "args.lr": 0.1, "args.layers": [1, 2], "cfg.lr": 0.2, "node.width": 4, "node.deep.depth": 2,
        "history.loss": [0.5], "last": [1.0, 2.0], "id.int": 7, "slots.lr": 0.5, "counts.seen": 3,
        "keys.0.5": ["encoder"], "keys.None": 2,
    }  # fmt: skip
    assert f"keys (a value whose key is a {Mode.__module__}.Mode)" in dump.left_out


def test_a_file_that_names_thousands_of_classes_is_refused(read):
    classes = {f"a{index}": forge.name("trap", f"C{index}") for index in range(1001)}
    with pytest.raises(DumpError, match="names more than 1,000 classes"):
        read(forge.archive(forge.mapping(**classes, state_dict=forge.weights())))
