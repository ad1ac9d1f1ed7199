"""Arguments, batches and outputs in a file: trees of plain containers, with a name in place of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nandoctor.dumps.stored_tensor import types_of
from nandoctor.errors import DumpError

PLAIN: tuple[type[Any], ...] = (bool, int, float, complex, str, type(None))
"""The types of values that are not containers."""
KIND = "<type>"
"""The key of the class's name, beside the fields of anything but a plain container."""
PACKED_SEQUENCE = "tuple:torch.nn.utils.rnn.PackedSequence"
MAX_NAME = 512
MAX_DEPTH = 16
AS_WRITTEN = "Use the file as the recorder wrote it."
"""The remedy if a file does not match its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A placeholder in a tree for the tensor of that name among a dump's arrays."""

    name: str


def name_tensors(tree: Any, name: str, take: Callable[[str, Any], str], depth: int = 0) -> Any:
    """Return the tree with a `Slot` for each tensor, under the name that `take(name, tensor)` returns.

    Raises:
        DumpError: the tree is nested too deeply, or holds what no writer of dumps puts there.
    """
    if depth > MAX_DEPTH:
        raise DumpError(f"{name!r} is nested too deeply.", remedy="Do not open it if you do not know who wrote it.")
    if isinstance(tree, dict):
        for key in tree:  # the name of a tensor is made of all keys above it
            if not (isinstance(key, (int, float, type(None))) or (isinstance(key, str) and len(key) <= MAX_NAME)):
                raise DumpError(f"{name!r} holds a key that is neither a short string nor a number.", remedy=AS_WRITTEN)
        return {key: name_tensors(item, f"{name}.{key}", take, depth + 1) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(name_tensors(item, f"{name}.{i}", take, depth + 1) for i, item in enumerate(tree))
    if isinstance(tree, (*PLAIN, *types_of("dtype", "device", "Size"))):
        return tree
    return Slot(name=take(name, tree))


def slots(tree: Any) -> Iterator[str]:
    """Yield the names of all tensors in a tree."""
    if isinstance(tree, Slot):
        yield tree.name
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from slots(item)
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from slots(item)


def is_plain_dict(tree: Any) -> bool:
    """Return True if a tree is a dict as it was saved, and does not stand for an object."""
    return isinstance(tree, dict) and KIND not in tree


def is_plain_data(value: Any) -> bool:
    """Return True for numbers and strings, alone or in lists, tuples and dicts with strings or integers as keys."""
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and is_plain_data(item) for key, item in value.items())
    return isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_plain_data, value)))


def holds_objects(value: Any) -> bool:
    """Return True if a tree has an entry that stands for an object."""
    if isinstance(value, Mapping):
        return KIND in value or any(map(holds_objects, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_objects, value))
