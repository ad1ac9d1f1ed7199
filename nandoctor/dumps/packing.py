"""Packs arguments, batches and outputs into trees of plain containers that any torch can read, and unpacks them."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from keyword import iskeyword
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from nandoctor.dumps.stored_tensor import TorchName
from nandoctor.dumps.trees import KIND, PACKED_SEQUENCE, Slot
from nandoctor.torch_compat import is_wrapped, tree_tensors, unwrap, version_of
from nandoctor.trees import MAX_DEPTH, Parts, attributes, parts, tree_map, walk

_NUMBERS_AND_TEXT: tuple[type[Any], ...] = (int, float, complex, str)
_PLAIN = frozenset({bool, *_NUMBERS_AND_TEXT, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, list, tuple})
_NAMED_TUPLE = "tuple:"
_MAX_OBJECTS = 1000
_NUMERIC_KINDS = "biufc"  # numpy's booleans, integers, floats and complex numbers


class Packed(NamedTuple):
    """A tree of plain containers; `notes` say what was left out, with None in its place.

    `tensors` are its tensors, each with its version at that time: a later version means that it was overwritten.
    `differentiable` are the indexes of those that required gradients.
    """

    tree: Any
    notes: tuple[str, ...] = ()
    tensors: tuple[tuple[torch.Tensor, int | None], ...] = ()
    differentiable: tuple[int, ...] = ()

    @property
    def overwritten(self) -> bool:
        """True if a tensor of the tree was written to since it was packed."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)

    def list_overwritten(self, name: str) -> list[str]:
        """Return the names of the tensors that were written to since, in a tree of that name."""
        written = {id(tensor) for tensor, version in self.tensors if version_of(tensor) != version}
        return [".".join(map(str, (name, *place))) for place, item in walk(self.tree) if id(item) in written]


def copied(packed: Packed) -> Packed:
    """Return the same with copies of the tensors, which nothing writes to; unchanged if one was overwritten already."""
    if packed.overwritten:
        return packed
    tree = map_tensors(packed.tree, torch.Tensor.clone)
    return packed._replace(tree=tree, tensors=tuple((tensor, version_of(tensor)) for tensor in tree_tensors(tree)))


def pack(value: Any, name: str, *, kinds: bool = False) -> Packed:
    """Return the value in plain containers, with tensors detached but not copied; `name` is what notes call it.

    With `kinds`, other containers keep the name of their class, and objects that have tensors as attributes are packed
    too: `fill` makes an object with the same fields.
    """
    if type(value) is torch.Tensor and not is_wrapped(value):  # most outputs are one tensor
        plain = value.detach()
        return Packed(plain, (), ((plain, version_of(plain)),), (0,) if value.requires_grad else ())
    packer = _Packer(kinds=kinds)
    tree = packer.pack(value, name, 0)
    return Packed(
        tree=tree,
        notes=tuple(packer.notes),
        tensors=tuple((tensor, version_of(tensor)) for tensor, _ in packer.tensors),
        differentiable=tuple(index for index, (_, wants_gradient) in enumerate(packer.tensors) if wants_gradient),
    )


@dataclass(slots=True)
class _Packer:
    kinds: bool
    entered: dict[int, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, bool]] = field(default_factory=list)

    def pack(self, value: Any, name: str, depth: int) -> Any:
        if type(value) in _PLAIN:
            return value
        num_notes, num_tensors = len(self.notes), len(self.tensors)
        try:
            return self._pack(value, name, depth)
        except Exception:  # a user's object, which may raise at any access
            del self.notes[num_notes:], self.tensors[num_tensors:]
            return self._leave_out(value, name)

    def _pack(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._take(value, name)
        for kind in _NUMBERS_AND_TEXT:
            if isinstance(value, kind):  # of a subclass, which no reader would import
                return kind(*kind.__getnewargs__(value))  # not what its class converts it to
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _NUMERIC_KINDS:
            return self._take(torch.from_numpy(np.array(value)), name)
        if depth >= MAX_DEPTH:
            return self._leave_out(value, name)
        inside = parts(value)
        if inside is None:
            return self._pack_object(value, name, depth) if self.kinds else self._leave_out(value, name)
        return self._pack_container(value, inside, name, depth)

    def _take(self, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        plain = unwrap(tensor).detach()
        if plain.shape != tensor.shape:
            self.notes.append(f"{name}: a tensor inside torch.func.vmap, which stands for one tensor per sample")
            return None
        self.tensors.append((plain, tensor.requires_grad))
        return plain

    def _pack_container(self, value: Any, inside: Parts, name: str, depth: int) -> Any:
        if not all(isinstance(key, (str, int)) for key in inside):
            return self._leave_out(value, name)
        packed = {key: self.pack(item, f"{name}.{key}", depth + 1) for key, item in inside.items() if key != KIND}
        if KIND in inside:  # the user's data, which a reader would take for the name of a class
            self.notes.append(f"{name}.{KIND}: the file format reserves this key")
        if type(value) in _CONTAINERS:
            return packed if type(value) is dict else type(value)(packed.values())
        is_named_tuple = hasattr(value, "_fields") and isinstance(value, tuple)
        if isinstance(value, (list, tuple, deque, Set)) and not is_named_tuple:
            return list(packed.values())
        if not self.kinds:
            return packed
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return {**packed, KIND: f"{_NAMED_TUPLE}{kind}" if is_named_tuple else kind}

    def _pack_object(self, value: Any, name: str, depth: int) -> Any:
        """Pack the attributes of an object with tensors, such as a batch of graphs; leave out any other object."""
        fields = None if id(value) in self.entered or len(self.entered) > _MAX_OBJECTS else _fields_of(value)
        self.entered[id(value)] = value
        if not fields:
            return self._leave_out(value, name)
        num_notes, num_tensors = len(self.notes), len(self.tensors)
        packed = {key: self.pack(item, f"{name}.{key}", depth + 1) for key, item in fields.items()}
        if len(self.tensors) == num_tensors:
            del self.notes[num_notes:]
            return self._leave_out(value, name)
        return {**packed, KIND: f"{type(value).__module__}.{type(value).__qualname__}"}

    def _leave_out(self, value: Any, name: str) -> None:
        self.notes.append(f"{name}: a {type(value).__qualname__}, which is neither a tensor nor plain data")


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the items of an object by name if it has keys, else its attributes; None for code."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType, torch.nn.Module)):
        return None
    if callable(getattr(value, "keys", None)) and hasattr(type(value), "__getitem__"):
        return {str(key): value[key] for key in value.keys()}  # noqa: SIM118 - not a mapping, it only has keys
    return attributes(value)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the tree with `change` applied to each tensor."""
    return tree_map(lambda item: change(item) if isinstance(item, torch.Tensor) else item, tree)


def fill(tree: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the tree with tensors in place of slots, torch's own dtypes, and the device of this replay for any."""

    def fill_item(item: Any) -> Any:
        if isinstance(item, Slot):
            return tensors[item.name]
        if isinstance(item, TorchName):
            found = getattr(torch, item.name.removeprefix("torch."), None)
            return found if isinstance(found, torch.dtype) else device
        if isinstance(item, dict) and isinstance(item.get(KIND), str):
            fields = {key: part for key, part in item.items() if key != KIND}
            return _rebuild(item[KIND], tree_map(fill_item, fields))
        return item

    return tree_map(fill_item, tree)


class Fields(dict[str, Any]):
    """A stand-in at the replay for an object whose fields the dump has: they are its items and its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the dump has no {name!r} of this object, only its fields: {', '.join(map(str, self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to(self, *_: Any, **__: Any) -> Fields:
        """Return the object itself: everything is on the device of the replay already."""
        return self


def _rebuild(kind: str, fields: dict[str, Any]) -> Any:
    """Return an object with these fields; no code of a class of the user's is run."""
    if kind == PACKED_SEQUENCE and isinstance(fields.get("batch_sizes"), torch.Tensor):
        return PackedSequence(**{**fields, "batch_sizes": fields["batch_sizes"].cpu()})
    if kind.startswith(_NAMED_TUPLE) and all(name.isidentifier() and not iskeyword(name) for name in fields):
        made = namedtuple("Fields", list(fields), rename=True)  # type: ignore[misc]  # the names are the file's
        return made(*fields.values())
    return Fields(fields)


def with_attributes(tree: Any) -> Any:
    """Return the tree with `Fields` in place of dicts, one of which may be a dataclass that was saved by `asdict`."""
    return tree_map(lambda it: Fields({k: with_attributes(v) for k, v in it.items()}) if type(it) is dict else it, tree)
