"""Objects among the arguments that a model was called with: dataclasses, enums, namespaces, classes and functions.

A recorder writes them as plain data: where their class is defined, and their fields. Only a replay of the user's own
dump makes them again; it imports the classes by the rules for the model's class.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.packing import pack
from nandoctor.dumps.recorded_format import is_transformers_config
from nandoctor.dumps.trees import KIND
from nandoctor.trees import PLAIN, attributes, made_of, tree_map

Source = Mapping[str, str]
"""Where a class or function is defined: its module, name and file, and the sha256 of the file."""

_TEXTS = (type(Path()), torch.dtype)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_STANDARD = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in (*_TEXTS, *_NAMESPACES)}
# transformers tries to fetch an implementation of any other name, even flash attention if it is not installed.
_ATTENTION = ("eager", "sdpa")
_KEYS = frozenset({str, int, bool})
_CODE_OPTIONS = frozenset({"auto_map", "trust_remote_code", "use_kernels", "allow_all_kernels", "quantization_config"})


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
    if kind in _TEXTS:
        return {"args": [str(value)]}
    is_code = callable(value) or isinstance(value, (torch.Tensor, nn.Module))
    # What a class creates or cleans up itself is more than the attributes of the object.
    is_managed = any({"__new__", "__del__"} & vars(base).keys() for base in kind.__mro__ if base is not object)
    if is_code or not (kind in _NAMESPACES or (is_dataclass(value) and not is_managed)):
        raise NotDescribableError
    return {"fields": attributes(value)}


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
            return found(**fields) if found in _NAMESPACES else made_of(found, fields)
        case {"args": [text]}:
            return getattr(torch, text.removeprefix("torch.")) if found is torch.dtype else found(text)
    return found


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
    public = {key: value for key, value in config.items() if not str(key).startswith("_") and key not in _CODE_OPTIONS}
    kept = {
        key: _only_values(value)
        for key, value in public.items()
        if "implementation" not in str(key) or (isinstance(value, str) and value in _ATTENTION)
    }
    return {**kept, "use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else kept
