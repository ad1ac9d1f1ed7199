"""Objects among the arguments that a model was called with: configs, enums, classes, functions and `partial`s.

A recorder writes them as plain data: where their class is defined, and their fields. Only a replay of the user's own
dump makes them again; it imports the classes by the rules for the model's class.
"""

from __future__ import annotations

import argparse
import functools
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.code_request import is_transformers_config
from nandoctor.dumps.packing import has_only_attributes, pack
from nandoctor.dumps.trees import KIND
from nandoctor.trees import PLAIN, Parts, attributes, made_of, parts, tree_map

Source = Mapping[str, str]
"""Where a class or function is defined: its module, name and file, and the sha256 of the file."""

_CALLS: Mapping[type, Callable[[Any], tuple[list[Any], Mapping[str, Any]]]] = {
    functools.partial: lambda value: ([value.func, *value.args], value.keywords),
    types.SimpleNamespace: lambda value: ([], vars(value)),
    **dict.fromkeys((type(Path()), torch.dtype), lambda value: ([str(value)], {})),
}
"""For classes of Python and torch, the arguments that make such an object again."""
_CONTAINERS = (argparse.Namespace, OrderedDict, UserDict, set, frozenset)
_STANDARD = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in (*_CONTAINERS, *_CALLS)}
# transformers tries to fetch an implementation of any other name, even flash attention if it is not installed.
_ATTENTION = ("eager", "sdpa")
_KEYS = frozenset({str, int, bool})
_CODE_OPTIONS = frozenset({"auto_map", "trust_remote_code", "use_kernels", "allow_all_kernels", "quantization_config"})
_HEAP_TYPE = 1 << 9
"""Set for classes that Python code defines (Py_TPFLAGS_HEAPTYPE): others keep state that is no attribute."""


class NotDescribableError(Exception):
    """An argument, or a part of it, cannot be made again."""


def describe_argument(value: Any, source_of: Callable[[Any], Source]) -> Any:
    """Return the argument as plain data; `source_of` describes a class or function that can be imported.

    Raises:
        NotDescribableError: it holds something that cannot be made again, or `source_of` raised that.
        RecursionError: its objects refer to one another.
    """

    def describe(item: Any) -> Any:
        if type(item) is dict and (KIND in item or not {*map(type, item)} <= _KEYS):
            raise NotDescribableError
        if type(item) in (*PLAIN, list, tuple, dict):
            return item
        if isinstance(item, (type, types.FunctionType)):
            return {KIND: source_of(item)}
        return {KIND: source_of(type(item)), **tree_map(describe, _content(item))}

    return tree_map(describe, value)


def _content(value: Any) -> dict[str, Any]:
    """Return what an object is made of besides its class."""
    kind = type(value)
    if isinstance(value, Enum):
        is_member = kind.__members__.get(value._name_) is value  # unlike several flags in one
        return {"member": value._name_} if is_member else {"value": value._value_}
    if is_transformers_config(kind):
        attention = str(getattr(value, "_attn_implementation", None) or "")
        packed = pack(value.to_dict(), "config")
        if packed.notes or packed.tensors:
            raise NotDescribableError
        return {"config": packed.tree, "attention": attention}
    if kind in _CALLS:
        args, keywords = _CALLS[kind](value)
        return {"args": args, "keywords": dict(keywords)}
    if not is_dataclass(value) and (inside := parts(value)) is not None:
        return {"args": _arguments_of(value, inside), "keywords": {}}
    is_code = callable(value) or isinstance(value, (torch.Tensor, nn.Module))
    if is_code or not has_only_attributes(kind) or not kind.__flags__ & _HEAP_TYPE:
        raise NotDescribableError
    return {"fields": attributes(value)}


def _arguments_of(value: Any, inside: Parts) -> list[Any]:
    """Return the arguments with which a container's class makes the same one again."""
    items = dict(inside) if isinstance(value, Mapping) else list(inside.values())
    args = items if isinstance(items, list) and hasattr(value, "_fields") else [items]
    twin = type(value)(*args)
    is_other = parts(twin) != inside and not isinstance(value, Set)  # equal sets may be in another order
    if twin != value or is_other or attributes(twin) != attributes(value):
        raise NotDescribableError
    return args


def make_argument(tree: Any, find: Callable[[Source], Any]) -> Any:
    """Return the argument that was described; `find` returns the class or function that was defined there."""

    def make(item: Any) -> Any:
        if not (isinstance(item, Mapping) and isinstance(item.get(KIND), Mapping)):
            return item
        content = {name: tree_map(make, part) for name, part in item.items() if name != KIND}
        return _make_object(find(item[KIND]), content)

    return tree_map(make, tree)


def _make_object(found: Any, content: Mapping[str, Any]) -> Any:
    """Return an object of the class with this content; the class or function itself if it has none."""
    match content:
        case {"config": values}:
            return make_config(found, values, content.get("attention", ""))
        case {"member": name}:
            return found[name]
        case {"value": value}:
            return found(value)
        case {"fields": fields}:
            return made_of(found, fields)
        case {"args": args, "keywords": keywords}:
            return _find_dtype(*args) if found is torch.dtype else found(*args, **keywords)
    return found


def _find_dtype(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def find_standard(source: Source) -> Any:
    """Return the class of Python or torch that is described, if it only holds data; else None."""
    return _STANDARD.get(f"{source.get('module')}:{source.get('name')}")


def make_config(kind: Any, values: Any, attention: str) -> Any:
    """Return a configuration of transformers with these values."""
    config = kind.from_dict(_only_values(values))
    if attention in _ATTENTION:
        config._attn_implementation = attention
    return config


def _only_values(config: Any) -> Any:
    """Return the configuration without entries that could make transformers fetch code or weights.

    Implementation names may refer to kernels on a hub, private entries set internal state, and a backbone loads its
    pretrained weights unless told otherwise.
    """
    if isinstance(config, (list, tuple)):
        return [_only_values(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    kept = {key: _only_values(value) for key, value in config.items() if _is_value(str(key), value)}
    return {**kept, "use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else kept


def _is_value(name: str, value: Any) -> bool:
    if "implementation" in name:
        return isinstance(value, str) and value in _ATTENTION and not name.startswith("_")
    return not name.startswith("_") and name not in _CODE_OPTIONS
