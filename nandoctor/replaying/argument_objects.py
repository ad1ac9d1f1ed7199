"""Objects among the arguments that a model was called with: configs, enums, classes, functions and `partial`s.

A recorder writes them as plain data: where their class is defined, and their fields. Only a replay of the user's own
dump makes them again; it imports the classes by the rules for the model's class.
"""

from __future__ import annotations

import argparse
import functools
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.code_request import is_transformers_config
from nandoctor.dumps.packing import has_only_attributes, made_of, pack, slots_of
from nandoctor.dumps.trees import KIND, MAX_DEPTH, PLAIN

Source = Mapping[str, str]
"""Where a class or function is defined: its module, name and file, and the sha256 of the file."""

_DATA: tuple[Any, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    OrderedDict,
    UserDict,
    set,
    frozenset,
    type(Path()),
)
_STANDARD = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in (*_DATA, functools.partial, torch.dtype)}
# transformers tries to fetch an implementation of any other name, even flash attention if it is not installed.
_ATTENTION = ("eager", "sdpa")
_CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset)
_MAX_OBJECTS = 1000
_KEYS = frozenset({str, int, bool})
_CODE_OPTIONS = frozenset({"auto_map", "trust_remote_code", "use_kernels", "allow_all_kernels", "quantization_config"})


class NotDescribableError(Exception):
    """An argument, or a part of it, cannot be made again."""


def describe_argument(value: Any, source_of: Callable[[Any], Source]) -> Any:
    """Return the argument as plain data; `source_of` describes a class or function that can be imported.

    Raises:
        NotDescribableError: it holds something that cannot be made again, or `source_of` raised that.
    """
    num_objects = 0

    def describe(value: Any, depth: int) -> Any:
        if type(value) in PLAIN:
            return value
        if type(value) in (list, tuple):
            return type(value)(describe(item, depth + 1) for item in value)
        if type(value) is dict:
            if KIND in value or not {*map(type, value)} <= _KEYS:
                raise NotDescribableError
            return {key: describe(item, depth + 1) for key, item in value.items()}
        nonlocal num_objects
        num_objects += 1
        if depth > MAX_DEPTH or num_objects > _MAX_OBJECTS:  # they may refer to one another
            raise NotDescribableError
        if isinstance(value, (type, types.FunctionType)):
            return {KIND: source_of(value)}
        return {KIND: source_of(type(value)), **_parts(value, lambda part: describe(part, depth + 1))}

    return describe(value, 0)


def _parts(value: Any, inside: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what an object is made of besides its class."""
    kind = type(value)
    if isinstance(value, Enum):
        is_member = kind.__members__.get(value._name_) is value  # unlike several flags in one
        return {"member": value._name_} if is_member else {"value": inside(value._value_)}
    if is_transformers_config(kind):
        attention = str(getattr(value, "_attn_implementation", None) or "")
        packed = pack(value.to_dict(), "config")
        if packed.notes or packed.tensors:
            raise NotDescribableError
        return {"config": packed.tree, "attention": attention}
    if (call := _call_that_makes(value)) is not None:
        if not _is_remade(value, call):
            raise NotDescribableError
        return {"args": inside(call[0]), "keywords": inside(call[1])}
    is_code = callable(value) or isinstance(value, (torch.Tensor, nn.Module))
    if is_code or not has_only_attributes(kind) or not kind.__flags__ & _HEAP_TYPE:
        raise NotDescribableError
    return {"fields": inside(_stored_attributes(value))}


def _call_that_makes(value: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments with which the object's class makes it again; None if it is made of its attributes."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args], value.keywords
    if isinstance(value, types.SimpleNamespace):
        return [], vars(value)
    if isinstance(value, (Path, torch.dtype)):
        return [str(value)], {}
    # A subclass of a container of Python may show other items than those that it holds.
    base: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), type(value))
    if isinstance(value, Mapping):
        return [dict(base.items(value))], {}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes, bytearray)):
        items = list(base.__iter__(value))
        return items if hasattr(type(value), "_fields") else [items], {}
    return None


def _is_remade(value: Any, call: tuple[list[Any], dict[str, Any]]) -> bool:
    """Return True if the call makes an object with the same parts and the same attributes."""
    if type(value) in (type(Path()), torch.dtype):  # a path stores its text in several forms, once it has been asked
        return True
    twin = type(value)(*call[0], **call[1])
    if type(value).__module__.startswith("omegaconf."):  # a node holds the one that it is in, which is not made here
        return bool(twin == value)
    again = _call_that_makes(twin) or ([], {})
    # Equal sets may have their items in another order.
    is_same = set(*again[0]) == set(*call[0]) if isinstance(value, Set) else again == call
    return is_same and _stored_attributes(twin) == _stored_attributes(value)


def _stored_attributes(value: Any) -> dict[str, Any]:
    """Return what the object's `__dict__` and slots hold, whatever its class says about its attributes."""
    stored = dict(object.__getattribute__(value, "__dict__")) if type(value).__dictoffset__ else {}
    for name, slot in slots_of(type(value)).items():
        with suppress(AttributeError):  # nothing was assigned to it
            stored[name] = slot.__get__(value)
    return stored


_HEAP_TYPE = 1 << 9
"""Set for classes that Python code defines (Py_TPFLAGS_HEAPTYPE): others keep state that is no attribute."""


def make_argument(tree: Any, find: Callable[[Source], Any]) -> Any:
    """Return the argument that was described; `find` returns the class or function that was defined there."""
    if type(tree) in (list, tuple):
        return type(tree)(make_argument(item, find) for item in tree)
    if not isinstance(tree, Mapping):
        return tree
    if not isinstance(tree.get(KIND), Mapping):
        return {key: make_argument(item, find) for key, item in tree.items()}
    return _make_object(find(tree[KIND]), tree, lambda part: make_argument(tree[part], find))


def _make_object(found: Any, tree: Mapping[str, Any], make: Callable[[str], Any]) -> Any:
    """Return an object of the class, or the class or function itself; `make` returns a part of the object."""
    if "config" in tree:
        return make_config(found, tree["config"], tree.get("attention", ""))
    if "member" in tree:
        return found[tree["member"]]
    if "value" in tree:
        return found(make("value"))
    if "fields" in tree:
        return made_of(found, make("fields"))
    if found is torch.dtype:
        return getattr(torch, make("args")[0].removeprefix("torch."))
    return found(*make("args"), **make("keywords")) if "args" in tree else found


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
