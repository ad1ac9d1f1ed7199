"""The published schema is that of the records; `python docs/report_schema.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jsonschema
import pytest
from report_schema import PUBLISHED, describe_schema, text

from nandoctor.evidence.codec import INLINED, to_plain
from nandoctor.evidence.formats import FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf."""

    kind: Literal["leaf"] = "leaf"
    size: float
    spot: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch
    of two lines."""

    leaves: tuple[Leaf, ...]
    branches: tuple[Branch, ...] = ()
    format: FloatFormat | None = None


SMALL = describe_schema(Branch, title="tree/1")


def test_published_schema_is_the_one_of_the_records():
    assert PUBLISHED.read_text(encoding="utf-8") == text(), "python docs/report_schema.py"


@pytest.mark.parametrize(
    ("data", "valid"),
    [
        ({"leaves": []}, True),
        ({"leaves": [{"kind": "leaf", "size": 1.5, "spot": [1, "x"]}], "format": "float16"}, True),
        ({"leaves": [{"kind": "leaf", "size": "nan"}], "branches": [{"leaves": []}], "new": 1}, True),
        ({}, False),
        ({"leaves": [{"kind": "leaf"}]}, False),
        ({"leaves": [{"size": 1.0}]}, False),
        ({"leaves": [{"kind": "root", "size": 1.0}]}, False),
        ({"leaves": [{"kind": "leaf", "size": "much"}]}, False),
        ({"leaves": [{"kind": "leaf", "size": 1.0, "spot": [1]}]}, False),
        ({"leaves": [], "format": "float12"}, False),
        ({"leaves": [], "branches": [{}]}, False),
    ],
)
def test_schema_accepts_what_the_records_hold_and_nothing_else(data, valid):
    assert jsonschema.Draft202012Validator(SMALL).is_valid(data) is valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Twig:
    """A twig."""

    leaf: Leaf = field(metadata=INLINED)
    length: int


def test_an_inlined_record_has_its_keys_among_the_others():
    made = describe_schema(Twig, title="twig/1")
    twig = made["$defs"]["Twig"]
    assert list(twig["properties"]) == ["kind", "size", "spot", "length"]
    assert twig["required"] == ["kind", "size", "length"]
    assert twig["description"] == "A twig. A leaf."
    assert list(made["$defs"]) == ["Twig"]
    jsonschema.validate(to_plain(Twig(leaf=Leaf(size=1.0), length=2)), made)


def test_made_reports_are_accepted():
    leaf = Leaf(size=float("inf"), spot=(1, "x"))
    jsonschema.validate(to_plain(Branch(leaves=(leaf,), branches=(Branch(leaves=()),))), SMALL)
