"""Write docs/report.schema.json: the JSON schema of reports, from the type hints of their records.

`describe_schema` returns the schema of any other record that is printed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_type_hints

from nandoctor import pipeline  # noqa: F401 - a report is read with the kinds of changes that are suggested
from nandoctor.causes.registry import list_pages
from nandoctor.evidence.codec import NONFINITE, arms_of, is_inlined, origin_of
from nandoctor.evidence.formats import FORMATS, FloatFormat
from nandoctor.evidence.report import SCHEMA, Report

PUBLISHED = Path(__file__).parent / "report.schema.json"
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
    """Return the schema of `to_plain`'s output for a `cls`; more keys are allowed, as newer versions may write them."""
    definitions: dict[str, Any] = {}
    root = _describe(cls, definitions)
    return {"$schema": _DIALECT, "title": title, **root, "$defs": dict(sorted(definitions.items()))}


def _describe(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        # A reference to the record's definition, which is made on first use: records may refer to each other.
        name = cast(type, hint).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _describe_record(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = origin_of(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_describe(arm, definitions) for arm in arms_of(arguments)]}
    assert origin is tuple, hint
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _describe(arguments[0], definitions)}
    places = [_describe(argument, definitions) for argument in arguments]
    return {"type": "array", "prefixItems": places, "minItems": len(places), "maxItems": len(places)}


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
            inner = _describe_record(hints[item.name], definitions)
            described["description"] += f" {inner['description']}"
            described["properties"] |= inner["properties"]
            described["required"] += inner["required"]
        elif item.compare:
            is_constant = item.name in ("kind", "schema") and isinstance(item.default, str)
            schema = {"const": item.default} if is_constant else _describe(hints[item.name], definitions)
            described["properties"][item.name] = schema
            if is_constant or item.default is item.default_factory is dataclasses.MISSING:
                described["required"].append(item.name)
    return described


def report_schema() -> dict[str, Any]:
    """Return the JSON schema of reports, with the causes of this version; a newer one may have more."""
    schema = describe_schema(Report, title=SCHEMA)
    schema["$defs"]["Cause"]["properties"]["code"] = {
        "type": "string",
        "examples": [page.code for page in list_pages()],
    }
    return schema


def text() -> str:
    """Return the content of the file."""
    return json.dumps(report_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PUBLISHED.write_text(text(), encoding="utf-8")
