"""Records survive JSON; the published schema is theirs; `python docs/report_schema.py` writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from report_schema import PUBLISHED, text

from nandoctor.evidence.codec import INLINED, MisfitError, from_plain, to_plain
from nandoctor.evidence.formats import FORMATS, FP16, FloatFormat
from nandoctor.evidence.report import Reproduction
from nandoctor.evidence.trace import NonfiniteCounts, TensorStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    kind: str = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    kind: str = "square"


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    tensors: tuple[TensorStats, ...]
    pair: tuple[str, int]
    value: float
    flag: bool
    mixed: float | int | str | None = None
    nothing: None = None
    anything: Any = None
    low: FloatFormat = FP16
    shape: Round | Square = Round()
    by_name: Mapping[str, float] = field(default_factory=dict)


def tensor(**changes):
    return replace(TensorStats(path="[0]", shape=(2, 3), dtype=FP16, numel=6, finite=True), **changes)


def alike(a, b):
    """Equality that tells 1 from 1.0 and sees through nothing else."""
    return a == b and repr(a) == repr(b)


COUNTS = NonfiniteCounts(
    num_nan=1,
    num_posinf=0,
    num_neginf=2,
    num_zero=3,
    smallest=2.0**-24,
    first_bad_index=(0, 1),
    samples=(0,),
)
MINIMAL = Everything(tensors=(), pair=("", 0), value=0.0, flag=False)


@pytest.mark.parametrize(
    "record",
    [
        MINIMAL,
        replace(MINIMAL, tensors=(tensor(counts=COUNTS), tensor(path="é\n", shape=(), min=-0.0, max=math.inf))),
        *(replace(MINIMAL, mixed=value) for value in (1, 1.0, "1", "text", -math.inf, 10**300)),
        *(replace(MINIMAL, anything=value) for value in ("nan", {"": -1})),
        *(replace(MINIMAL, low=low) for low in FORMATS.values()),
        replace(MINIMAL, shape=Square(), by_name={"": 1e-300, "b": -math.inf}, value=math.inf, pair=("nan", -1)),
    ],
)
def test_records_survive_json(record):
    text = json.dumps(to_plain(record), allow_nan=False)
    assert alike(from_plain(Everything, json.loads(text)), record)


def test_nonfinite_numbers_are_words_that_come_back():
    plain = to_plain(tensor(min=-math.inf, max=math.inf, median=math.nan))
    assert (plain["min"], plain["max"], plain["median"]) == ("-inf", "inf", "nan")
    back = from_plain(TensorStats, plain)
    assert (back.min, back.max) == (-math.inf, math.inf)
    assert math.isnan(back.median)


def test_the_sample_is_neither_written_nor_read():
    plain = to_plain(tensor(sample=np.ones(4096)))
    assert "sample" not in plain
    assert from_plain(TensorStats, {**plain, "sample": [1.0]}).sample is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    row: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    spot: Spot = field(metadata=INLINED)
    other: Spot
    size: float


def test_a_missing_inlined_key_is_named_by_its_place():
    with pytest.raises(MisfitError, match=r"Finding\.row is missing"):
        from_plain(Finding, {"other": {"row": 2}, "size": 0.5})


def test_keys_of_a_later_version_are_passed_over():
    assert from_plain(TensorStats, {**to_plain(tensor()), "skewness": 3}) == tensor()


def test_fields_with_a_default_may_be_missing():
    assert from_plain(Reproduction, {"grade": "finite"}) == Reproduction(grade="finite")


@pytest.mark.parametrize(
    ("cls", "change", "message"),
    [
        (TensorStats, {"numel": True}, r"TensorStats\.numel should be a whole number, not True"),
        (TensorStats, {"finite": 1}, r"TensorStats\.finite should be true or false, not 1"),
        (TensorStats, {"path": None}, r"TensorStats\.path should be a string, not None"),
        (TensorStats, {"max": "huge"}, r"TensorStats\.max should be a number, not 'huge'"),
        (TensorStats, {"max": True}, r"TensorStats\.max should be a number, not True"),
        (TensorStats, {"max": 10**400}, r"TensorStats\.max should be a number, not a whole number of 1,329 bits"),
        (TensorStats, {"shape": [2, "x"]}, r"TensorStats\.shape\[1\] should be a whole number, not 'x'"),
        (TensorStats, {"shape": 2}, r"TensorStats\.shape should be a list, not 2"),
        (TensorStats, {"dtype": "float9"}, r"TensorStats\.dtype should be one of float16, .*, not 'float9'"),
        (TensorStats, {"dtype": ["float16"]}, r"TensorStats\.dtype should be one of"),
        (TensorStats, {"counts": []}, r"TensorStats\.counts should be an object, not a list of 0"),
        (TensorStats, {"counts": {"num_nan": 1}}, r"TensorStats\.counts\.num_posinf is missing"),
        (Everything, {"pair": ["a"]}, r"Everything\.pair should be a list of 2, not a list of 1"),
        (Everything, {"nothing": 1}, r"Everything\.nothing should be null, not 1"),
        (Everything, {"shape": {"kind": []}}, r"Everything\.shape should be an object of kind round, square"),
        (Everything, {"by_name": {1: 2.0}}, r"a key of Everything\.by_name should be a string, not 1"),
        (Everything, {"by_name": {"a\n": "b"}}, r"Everything\.by_name\['a\\n'\] should be a number, not 'b'"),
        (Everything, {"pair": np.zeros(2)}, r"Everything\.pair should be a list, not a value of type ndarray"),
        (Everything, {"value": np.zeros(2)}, r"Everything\.value should be a number, not a value of type ndarray"),
        (Everything, {"tensors": [{}]}, r"Everything\.tensors\[0\]\.path is missing"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(cls, change, message):
    whole = {
        TensorStats: tensor(),
        Everything: Everything(tensors=(), pair=("a", 1), value=0.5, flag=True),
    }[cls]
    with pytest.raises(MisfitError, match=message):
        from_plain(cls, {**to_plain(whole), **change})


class Untouchable:
    """What an unpickled file may hold: no code of it may run."""

    def __getattribute__(self, name):
        if name == "__class__":  # isinstance asks for it
            return object.__getattribute__(self, name)
        raise AssertionError(name)

    __eq__ = __hash__ = __repr__ = __str__ = __iter__ = __len__ = __float__ = __index__ = None


@pytest.mark.parametrize(
    "hint",
    [
        TensorStats,
        Everything,
        str,
        float,
        FloatFormat,
        tuple[int, ...],
        Mapping[str, int],
        float | None,
        Round | Square,
    ],
)
def test_nothing_of_the_data_is_called(hint):
    with pytest.raises(MisfitError, match="Untouchable"):
        from_plain(hint, Untouchable(), place="it")


def test_a_hook_decodes_the_values_of_its_hint():
    found = from_plain(tuple[Spot, ...], [3, 4], place="spots", hooks={Spot: lambda data, place: f"{data} in {place}"})
    assert found == ("3 in spots[0]", "4 in spots[1]")


def test_published_schema_is_the_one_of_the_records():
    assert PUBLISHED.read_text(encoding="utf-8") == text(), "python docs/report_schema.py"
