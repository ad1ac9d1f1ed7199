"""Convert records to plain JSON data and back, by their type hints."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from nandoctor.errors import ReportError
from nandoctor.evidence.formats import FORMATS, FloatFormat

T = TypeVar("T")

# JSON has no literals for these (RFC 8259, section 6); other parsers reject Python's "NaN" and "Infinity".
NONFINITE = ("nan", "inf", "-inf")
INLINED = {"inlined": True}
"""Metadata of a field that holds a record: its keys are merged into those of the enclosing record."""
_hints_of = functools.cache(get_type_hints)
_PLAIN_TYPES = {str: "a string", int: "a whole number", bool: "true or false", NoneType: "null"}


def to_plain(record: Any) -> Any:
    """Return a record as data that any JSON writer accepts.

    Formats become their names, tuples lists, and non-finite floats the strings "nan", "inf" and "-inf". Fields with
    `compare=False` (`TensorStats.sample`) are intermediate data and left out.
    """
    if isinstance(record, FloatFormat):
        return record.name
    if dataclasses.is_dataclass(record):
        plain: dict[str, Any] = {}
        for item in dataclasses.fields(record):
            if item.compare:
                value = to_plain(getattr(record, item.name))
                plain |= value if is_inlined(item) else {item.name: value}
        return plain
    if isinstance(record, Mapping):
        return {key: to_plain(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_plain(item) for item in record]
    if isinstance(record, float) and not math.isfinite(record):
        return str(record)
    return record


def is_inlined(item: dataclasses.Field[Any]) -> bool:
    """Return True if the keys of the field's record are merged into those of the enclosing record."""
    return bool(item.metadata.get("inlined"))


def from_plain(cls: type[T], data: Any) -> T:
    """Return the record of class `cls` that `to_plain` converted to `data`, checking every value's type.

    Unknown keys are ignored, so that a report may have more than this version reads. Raise ReportError with the place
    of a missing or wrong value.
    """
    return cast(T, _decode(cls, data, cls.__name__))


def _decode(hint: Any, data: Any, place: str) -> Any:
    if hint is Any:
        return data
    if dataclasses.is_dataclass(hint) and hint is not FloatFormat:
        return _decode_record(cast(type, hint), data, place)
    decode_generic = _GENERIC_DECODERS.get(get_origin(hint))
    if decode_generic is not None:
        return decode_generic(get_args(hint), data, place)
    if hint is FloatFormat:
        return FORMATS[_decode_choice(tuple(FORMATS), data, place)]
    if hint is float:
        return _decode_float(data, place)
    if type(data) is hint:  # not isinstance: bool is a subclass of int, and True is not a count
        return data
    raise _wrong(data, place, _PLAIN_TYPES[hint])


def _decode_record(cls: type, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(data, place, "an object")
    values = {}
    for item in dataclasses.fields(cls):
        if is_inlined(item):
            values[item.name] = _decode(_hints_of(cls)[item.name], data, place)
        elif item.name in data and item.compare:
            values[item.name] = _decode(_hints_of(cls)[item.name], data[item.name], f"{place}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise _damaged(f"{place}.{item.name} is missing.")
    return cls(**values)


def _decode_union(arms: tuple[Any, ...], data: Any, place: str) -> Any:
    """Decode as the member of the value's own type or `kind`, else the first: `float | int | str` keeps an int."""
    if float in arms and data in NONFINITE:
        return float(data)
    if type(data) in arms:
        return data
    records = filter(dataclasses.is_dataclass, arms)
    by_kind = {item.default: arm for arm in records for item in dataclasses.fields(arm) if item.name == "kind"}
    if not by_kind:
        return _decode(arms[0], data, place)
    if not isinstance(data, dict) or data.get("kind") not in tuple(by_kind):  # a tuple: the kind may be unhashable
        raise _wrong(data, place, f"an object of kind {', '.join(map(str, by_kind))}")
    return _decode(by_kind[data["kind"]], data, place)


def _decode_tuple(hints: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong(data, place, "a list")
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(data)
    if len(hints) != len(data):
        raise _wrong(data, place, f"a list of {len(hints)}")
    return tuple(_decode(hint, item, f"{place}[{i}]") for i, (hint, item) in enumerate(zip(hints, data, strict=True)))


def _decode_choice(choices: tuple[Any, ...], data: Any, place: str) -> Any:
    if data in choices:
        return data
    raise _wrong(data, place, f"one of {', '.join(map(str, choices))}")


_GENERIC_DECODERS: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
    Union: _decode_union,
    UnionType: _decode_union,
    tuple: _decode_tuple,
    Literal: _decode_choice,
}


def _decode_float(data: Any, place: str) -> float:
    is_float = type(data) is float or data in NONFINITE
    if is_float or (type(data) is int and abs(data) < 2**1023):
        return float(data)
    raise _wrong(data, place, "a number")


def _wrong(data: Any, place: str, wanted: str) -> ReportError:
    return _damaged(f"{place} should be {wanted}, not {reprlib.repr(data)}.")


def _damaged(what: str) -> ReportError:
    return ReportError(
        what, remedy="The report was edited or cut short, or another tool wrote it: make a new one from the dump."
    )
