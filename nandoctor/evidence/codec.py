"""Convert records to plain data and back, by their type hints: reports, recorded files, settings.

Nothing of the data is called, and values are compared only once their type is known. A record's hints bound how deep
the data is read; a value whose hint is `Any` is handed on unread.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
from collections import OrderedDict, abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from nandoctor.evidence.formats import FORMATS, FloatFormat

T = TypeVar("T")

# JSON has no literals for these (RFC 8259, section 6); other parsers reject Python's "NaN" and "Infinity".
NONFINITE = ("nan", "inf", "-inf")
INLINED = {"inlined": True}
"""Metadata of a field that holds a record: its keys are merged into those of the enclosing record."""
MAX_VALUES = 50_000_000
"""A list that stands in itself a thousand times claims more values than any file lists."""
_MAX_BITS = 1023
"""A larger integer fits no double, and to print it could take hours."""
OPEN_UNIONS: dict[Any, Mapping[str, Any]] = {}
"""By a class without fields, the records that stand for it, by their `kind`; other rooms add to them."""
_hints_of = functools.cache(get_type_hints)
_NAMES: dict[Any, str] = {
    **{str: "a string", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"},
    **{list: "a list", dict: "an object", OrderedDict: "an object"},
}

Hook = Callable[[Any, str], Any]
"""Decodes the data at a place, named by the second argument."""


class MisfitError(ValueError):
    """Plain data that does not fit its record; the text names the place and what should be there."""


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


def to_json(record: Any) -> str:
    """Return a record as JSON text, ASCII only: names may hold characters that a terminal or encoding cannot take."""
    return json.dumps(to_plain(record), indent=1, allow_nan=False)


def is_inlined(item: dataclasses.Field[Any]) -> bool:
    """Return True if the keys of the field's record are merged into those of the enclosing record."""
    return bool(item.metadata.get("inlined"))


def from_plain(
    cls: type[T], data: Any, *, place: str = "", hooks: Mapping[Any, Hook] | None = None, most: int = MAX_VALUES
) -> T:
    """Return the record of class `cls`, or the value of another type hint, that `to_plain` converted to `data`.

    Unknown keys are ignored, so that a file may have more than this version reads. `place` is the name of `data` in
    messages, `hooks` has functions that decode the values of a hint, and `most` is the number of values to read. Raises
    MisfitError if a value is missing or wrong, with its place, or if there are too many.
    """
    return cast(T, _Decoder(hooks or {}, most).decode(cls, data, place or cls.__name__))


def origin_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the generic type of a hint and its arguments; an open union is a union of itself."""
    return (Union, (hint,)) if hint in OPEN_UNIONS else (get_origin(hint), get_args(hint))


def arms_of(hints: Iterable[Any]) -> Iterator[Any]:
    """Yield the members of a union, with the members of open ones in their place."""
    for hint in hints:
        yield from (arm for _, arm in sorted(OPEN_UNIONS.get(hint, {"": hint}).items()))


class _Decoder:
    """One decoding, which counts the values: a list that a pickle has once may stand in it a million times."""

    def __init__(self, hooks: Mapping[Any, Hook], most: int) -> None:
        self._hooks, self._num_left = hooks, most
        self._by_origin: Mapping[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
            Union: self._decode_union,
            UnionType: self._decode_union,
            tuple: self._decode_tuple,
            abc.Mapping: self._decode_mapping,
            Literal: _decode_choice,
        }

    def decode(self, hint: Any, data: Any, place: str) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise MisfitError(f"{place} is one value too many.")
        if hint in self._hooks:
            return self._hooks[hint](data, place)
        if hint is Any:
            return data
        if hint is FloatFormat:
            return FORMATS[_decode_choice(tuple(FORMATS), data, place)]
        if dataclasses.is_dataclass(hint):
            return self._decode_record(cast(type, hint), data, place)
        origin, arguments = origin_of(hint)
        if origin in self._by_origin:
            return self._by_origin[origin](arguments, data, place)
        return _decode_scalar(hint, data, place)

    def _decode_record(self, cls: type, data: Any, place: str) -> Any:
        if not isinstance(data, dict):
            raise _wrong(data, place, "an object")
        values = {}
        for item in dataclasses.fields(cls):
            hint = _hints_of(cls)[item.name]
            if is_inlined(item):
                values[item.name] = self.decode(hint, data, place)
            elif item.name in data and item.compare:
                values[item.name] = self.decode(hint, data[item.name], f"{place}.{item.name}")
            elif item.default is item.default_factory is dataclasses.MISSING:
                raise MisfitError(f"{place}.{item.name} is missing.")
        return cls(**values)

    def _decode_union(self, arms: tuple[Any, ...], data: Any, place: str) -> Any:
        """Decode as the member of the value's own type or `kind`, else the first: `float | int | str` keeps an int."""
        if float in arms and _spells_nonfinite(data):
            return float(data)
        if type(data) in arms:
            return data
        records = filter(dataclasses.is_dataclass, arms_of(arms))
        by_kind = {item.default: arm for arm in records for item in dataclasses.fields(arm) if item.name == "kind"}
        if not by_kind:
            return self.decode(arms[0], data, place)
        kind = data.get("kind") if isinstance(data, dict) else None
        if type(kind) is not str or kind not in by_kind:
            raise _wrong(data, place, f"an object of kind {', '.join(map(str, by_kind))}")
        return self.decode(by_kind[kind], data, place)

    def _decode_tuple(self, hints: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(data, (list, tuple)):
            raise _wrong(data, place, "a list")
        if hints[-1] is not Ellipsis and len(hints) != len(data):
            raise _wrong(data, place, f"a list of {len(hints)}")
        hints = (hints[0],) * len(data) if hints[-1] is Ellipsis else hints
        items = enumerate(zip(hints, data, strict=True))
        return tuple(self.decode(hint, item, f"{place}[{index}]") for index, (hint, item) in items)

    def _decode_mapping(self, hints: tuple[Any, ...], data: Any, place: str) -> dict[str, Any]:
        """Decode a mapping of strings to values of one hint."""
        if not isinstance(data, Mapping):
            raise _wrong(data, place, "an object")
        for key in data:
            if type(key) is not str:
                raise _wrong(key, f"a key of {place}", "a string")
        return {key: self.decode(hints[1], item, f"{place}[{reprlib.repr(key)}]") for key, item in data.items()}


def _decode_scalar(hint: Any, data: Any, place: str) -> Any:
    if hint is float and (_spells_nonfinite(data) or _fits_a_float(data)):
        return float(data)
    if type(data) is hint:  # not isinstance: bool is a subclass of int, and True is not a count
        return data
    raise _wrong(data, place, _NAMES[hint])


def _decode_choice(choices: tuple[Any, ...], data: Any, place: str) -> Any:
    if type(data) in map(type, choices) and data in choices:
        return data
    raise _wrong(data, place, f"one of {', '.join(map(str, choices))}")


def _spells_nonfinite(data: Any) -> bool:
    return type(data) is str and data in NONFINITE


def _fits_a_float(data: Any) -> bool:
    return type(data) is float or (type(data) is int and data.bit_length() <= _MAX_BITS)


def _wrong(data: Any, place: str, wanted: str) -> MisfitError:
    return MisfitError(f"{place} should be {wanted}, not {_describe(data)}.")


def _describe(data: Any) -> str:
    """Return a short value as it is, and the kind of anything else, whose own text may be anything."""
    if type(data) is int and not _fits_a_float(data):
        return f"a whole number of {data.bit_length():,} bits"
    if type(data) in (str, int, float, bool, NoneType):
        return reprlib.repr(data)
    if type(data) is list:
        return f"a list of {len(data)}"
    return _NAMES.get(type(data), f"a value of type {type(data).__name__}")
