"""The JSON schema of the records, made from their type hints."""

from __future__ import annotations

import dataclasses
import inspect
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nandoctor.evidence.formats import FORMATS, FloatFormat
from nandoctor.evidence.serialization import NONFINITE, is_inlined

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"anyOf": [{"type": "number"}, {"enum": list(NONFINITE)}]},
    NoneType: {"type": "null"},
    FloatFormat: {"enum": list(FORMATS)},
    Any: {},
}


def describe_schema(cls: type, *, title: str) -> dict[str, Any]:
    """The schema of what `to_plain` makes of a `cls`; further keys are allowed, as newer versions may write them."""
    definitions: dict[str, Any] = {}
    root = _describe(cls, definitions)
    return {"$schema": _DIALECT, "title": title, **root, "$defs": dict(sorted(definitions.items()))}


def _describe(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return _refer(hint, definitions)
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_describe(arm, definitions) for arm in arguments]}
    assert origin is tuple, hint
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _describe(arguments[0], definitions)}
    places = [_describe(argument, definitions) for argument in arguments]
    return {"type": "array", "prefixItems": places, "minItems": len(places), "maxItems": len(places)}


def _refer(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the record's definition, which is made where it is met first: records may hold each other."""
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}
        definitions[cls.__name__] = _describe_record(cls, definitions)
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _describe_record(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    described: dict[str, Any] = {
        "type": "object",
        "description": " ".join((inspect.getdoc(cls) or "").split()),
        "properties": {},
        "required": [],
    }
    for item in dataclasses.fields(cls):
        if is_inlined(item):
            _inline(_describe_record(hints[item.name], definitions), described)
        elif item.compare:
            _add_property(item, hints[item.name], described, definitions)
    return described


def _inline(inner: dict[str, Any], described: dict[str, Any]) -> None:
    """Put the keys of `inner` among those of `described`, which says what they mean as well."""
    described["description"] += f" {inner['description']}"
    described["properties"] |= inner["properties"]
    described["required"] += inner["required"]


def _add_property(
    item: dataclasses.Field[Any], hint: Any, described: dict[str, Any], definitions: dict[str, Any]
) -> None:
    is_constant = item.name in ("kind", "schema") and isinstance(item.default, str)
    described["properties"][item.name] = {"const": item.default} if is_constant else _describe(hint, definitions)
    if is_constant or item.default is item.default_factory is dataclasses.MISSING:
        described["required"].append(item.name)
