"""Packs arguments, batches and outputs into trees of plain containers that any torch can read, and unpacks them."""

from __future__ import annotations

import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from nandoctor.dumps.trees import KIND, MAX_DEPTH, PACKED_SEQUENCE, Slot
from nandoctor.torch_compat import is_wrapped, unwrap, version_of

_NUMBERS_AND_TEXT: tuple[type[Any], ...] = (int, float, complex, str)
_PLAIN = frozenset({bool, *_NUMBERS_AND_TEXT, type(None), torch.dtype, torch.device, torch.Size})
_SEQUENCES = frozenset({list, tuple})
_KEYS = frozenset({str, int})
_NAMED_TUPLE = "tuple:"
_MAX_OBJECTS = 1000
_LEFT_OUT = ", which is neither a tensor nor plain data"
_NUMERIC_KINDS = "biufc"  # numpy's booleans, integers, floats and complex numbers


class Packed(NamedTuple):
    """A tree of plain containers; `notes` say what was left out, or changed its type.

    `tensors` are its tensors, each with its version at that time: a later version means that it was overwritten.
    `differentiable` are the indexes of those that required gradients. `hidden` is True if some were tensors inside
    `torch.func.vmap`, which cannot be kept.
    """

    tree: Any
    notes: tuple[str, ...] = ()
    tensors: tuple[tuple[torch.Tensor, int | None], ...] = ()
    differentiable: tuple[int, ...] = ()
    hidden: bool = False

    @property
    def left_out(self) -> list[str]:
        """The notes on what is not in the tree at all, but None in its place."""
        return [note for note in self.notes if note.endswith(_LEFT_OUT)]

    @property
    def overwritten(self) -> bool:
        """True if a tensor of the tree was written to since it was packed."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)


def copied(packed: Packed) -> Packed:
    """Return the same with copies of the tensors, which nothing writes to; unchanged if one was overwritten already."""
    if packed.overwritten:
        return packed
    copies: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    tree = map_tensors(packed.tree, copy)
    return packed._replace(tree=tree, tensors=tuple((tensor, version_of(tensor)) for tensor in copies))


def pack(value: Any, name: str, *, kinds: bool = False) -> Packed:
    """Return the value in plain containers, with tensors detached but not copied; `name` is what notes call it.

    With `kinds`, other containers keep the name of their class, and objects that have tensors as attributes are packed
    too: `fill` makes an object with the same fields.
    """
    if type(value) is torch.Tensor and not is_wrapped(value):  # what most models return
        plain = value.detach()
        taken = ((plain, version_of(plain)),)
        return Packed(tree=plain, tensors=taken, differentiable=(0,) if value.requires_grad else ())
    packer = _Packer(kinds=kinds)
    tree = packer.pack(value, name, 0)
    return Packed(
        tree=tree,
        notes=tuple(packer.notes),
        tensors=tuple((tensor, version_of(tensor)) for tensor in packer.tensors),
        differentiable=tuple(packer.differentiable),
        hidden=packer.hidden,
    )


@dataclass(slots=True)
class _Packer:
    kinds: bool
    entered: dict[int, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    differentiable: list[int] = field(default_factory=list)
    hidden: bool = False

    def pack(self, value: Any, name: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is torch.Tensor and not is_wrapped(value):
            return self._take(value, wants_gradient=value.requires_grad)
        if kind in _SEQUENCES and depth < MAX_DEPTH:
            return kind([self.pack(item, f"{name}.{index}", depth + 1) for index, item in enumerate(value)])
        if kind is dict and depth < MAX_DEPTH:
            return self._pack_container(value, name, depth)
        num_notes, num_tensors, num_differentiable = len(self.notes), len(self.tensors), len(self.differentiable)
        try:
            return self._pack(value, name, depth)
        except Exception:  # a user's object, which may raise at any access
            del self.notes[num_notes:], self.tensors[num_tensors:], self.differentiable[num_differentiable:]
            return self._leave_out(value, name)

    def _pack(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            plain = unwrap(value)
            if plain is not value and plain.shape != value.shape:
                self.notes.append(f"{name}: a tensor inside torch.func.vmap, which stands for one tensor per sample")
                self.hidden = True
                return None
            return self._take(plain, wants_gradient=value.requires_grad)
        for kind in _NUMBERS_AND_TEXT:
            if isinstance(value, kind):  # of a subclass, which no reader would import
                return kind(*kind.__getnewargs__(value))  # not what its class converts it to
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _NUMERIC_KINDS:
            return self._take(torch.from_numpy(np.array(value)), wants_gradient=False)
        return self._pack_container(value, name, depth) if depth < MAX_DEPTH else self._leave_out(value, name)

    def _take(self, tensor: torch.Tensor, *, wants_gradient: bool) -> torch.Tensor:
        if wants_gradient:
            self.differentiable.append(len(self.tensors))
        self.tensors.append(tensor.detach())
        return self.tensors[-1]

    def _pack_container(self, value: Any, name: str, depth: int) -> Any:
        fields = value if type(value) is dict else _fields(value)
        if fields is None and self.kinds:
            return self._pack_object(value, name, depth)
        if fields is None or not ({*map(type, fields)} <= _KEYS or all(isinstance(key, (str, int)) for key in fields)):
            return self._leave_out(value, name)
        packed = {key: self.pack(item, f"{name}.{key}", depth + 1) for key, item in fields.items() if key != KIND}
        if KIND in fields:  # the user's data, which a reader would take for the name of a class
            self.notes.append(f"{name}.{KIND}: the file format reserves this key")
        if type(value) is dict:
            return packed
        is_named_tuple = isinstance(value, tuple)
        if not (self.kinds and is_named_tuple):
            self.notes.append(f"{name}: kept as a plain dict of its fields, not as {type(value).__qualname__}")
        if not self.kinds:
            return packed
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return {**packed, KIND: f"{_NAMED_TUPLE}{kind}" if is_named_tuple else kind}

    def _pack_object(self, value: Any, name: str, depth: int) -> Any:
        """Pack the attributes of an object with tensors, such as a batch of graphs; leave out any other object."""
        fields = None if id(value) in self.entered or len(self.entered) > _MAX_OBJECTS else attributes_of(value)
        self.entered[id(value)] = value
        if not fields:
            return self._leave_out(value, name)
        num_notes, num_tensors = len(self.notes), len(self.tensors)
        packed = {key: self.pack(item, f"{name}.{key}", depth + 1) for key, item in fields.items()}
        if len(self.tensors) == num_tensors:
            del self.notes[num_notes:]
            return self._leave_out(value, name)
        self.notes.append(f"{name}: the methods of a {type(value).__qualname__}, whose fields are kept")
        return {**packed, KIND: f"{type(value).__module__}.{type(value).__qualname__}"}

    def _leave_out(self, value: Any, name: str) -> None:
        self.notes.append(f"{name}: a {type(value).__qualname__}{_LEFT_OUT}")


def _fields(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container by name or index; None if it is not a container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name, None) for entry in dataclasses.fields(value)}
    return None


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slots of a class and its bases by their attribute names; a private one is mangled with its class."""
    kinds = [base for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    found = (item for base in kinds for item in vars(base).items())
    return {name: item for name, item in found if isinstance(item, MemberDescriptorType)}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the items of an object by name if it has keys, else its attributes; None for code."""
    if isinstance(value, (type, ModuleType, FunctionType, MethodType, torch.nn.Module)):
        return None
    if callable(getattr(value, "keys", None)) and hasattr(type(value), "__getitem__"):
        return {str(key): value[key] for key in value.keys()}  # noqa: SIM118 - not a mapping, it only has keys
    names = [*slots_of(type(value)), *getattr(value, "__dict__", {})]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the tree with `change` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) is dict:
        return {key: map_tensors(item, change) for key, item in tree.items()}
    return type(tree)(map_tensors(item, change) for item in tree) if type(tree) in (list, tuple) else tree


def fill(tree: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the tree with each `Slot` replaced by its tensor, and devices by that of this replay."""
    if isinstance(tree, Slot):
        return tensors[tree.name]
    if isinstance(tree, torch.device):
        return device
    if type(tree) is dict:
        filled = {key: fill(item, tensors, device) for key, item in tree.items() if key != KIND}
        return _rebuild(tree[KIND], filled) if isinstance(tree.get(KIND), (str, type)) else filled
    return type(tree)(fill(item, tensors, device) for item in tree) if type(tree) in (list, tuple) else tree


def with_classes(tree: Any, find: Callable[[str], type[Any] | None]) -> Any:
    """Return the tree with classes in place of their names, if `find` knows them and they only have attributes."""
    if type(tree) is not dict:
        return type(tree)(with_classes(item, find) for item in tree) if type(tree) in (list, tuple) else tree
    items = {key: with_classes(item, find) for key, item in tree.items()}
    found = find(items[KIND]) if isinstance(items.get(KIND), str) else None
    return items if found is None or not has_only_attributes(found) else {**items, KIND: found}


def has_only_attributes(kind: type[Any]) -> bool:
    """Return True if its objects are their attributes alone, with nothing that the class has to create or clean up."""
    is_keyed = issubclass(kind, Mapping) or callable(getattr(kind, "keys", None))
    is_made = any({"__new__", "__del__"} & vars(base).keys() for base in kind.__mro__ if base is not object)
    return not is_made and (dataclasses.is_dataclass(kind) or not is_keyed)


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


def made_of(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    """Return an object of the class with these fields; no code of the class is run."""
    instance = object.__new__(kind)
    held = object.__getattribute__(instance, "__dict__") if kind.__dictoffset__ else {}
    for name, value in fields.items():
        if isinstance(inspect.getattr_static(kind, name, None), MemberDescriptorType):
            object.__setattr__(instance, name, value)  # a slot
        else:
            held[name] = value  # even if the class has a property of that name
    return instance


def _rebuild(kind: str | type[Any], fields: dict[str, Any]) -> Any:
    """Return an object with these fields, of the class itself if it is given; no code of the class is run."""
    if isinstance(kind, type):
        return made_of(kind, fields)
    if kind == PACKED_SEQUENCE and isinstance(fields.get("batch_sizes"), torch.Tensor):
        return PackedSequence(**{**fields, "batch_sizes": fields["batch_sizes"].cpu()})
    if kind.startswith(_NAMED_TUPLE) and all(name.isidentifier() and not iskeyword(name) for name in fields):
        made = namedtuple("Fields", list(fields), rename=True)  # type: ignore[misc]  # the names are the file's
        return made(*fields.values())
    return Fields(fields)
