"""Arguments, batches and outputs in a file: trees of plain containers, with a name in the place of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nandoctor.dumps.stored_tensor import types_of
from nandoctor.errors import DumpError

PLAIN: tuple[type[Any], ...] = (bool, int, float, complex, str, type(None))
"""Values that are no containers."""
KIND = "<type>"
"""Beside the fields of what is no plain container: the class that it was of."""
PACKED_SEQUENCE = "tuple:torch.nn.utils.rnn.PackedSequence"
MAX_NAME = 512
MAX_DEPTH = 16
AS_WRITTEN = "Take the file as the recorder wrote it."
"""What to do where a file is not what its format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Stands in a tree for the tensor of that name among a dump's arrays."""

    name: str


def name_tensors(tree: Any, name: str, take: Callable[[str, Any], str], depth: int = 0) -> Any:
    """The tree with a `Slot` for each tensor, under the name that `take(name, tensor)` answers.

    Raises:
        DumpError: the tree nests without end, or holds what no writer of dumps puts there.
    """
    if depth > MAX_DEPTH:
        raise DumpError(f"{name!r} is nested without end.", remedy="Do not open it if you do not know who wrote it.")
    if isinstance(tree, dict):
        keys = [_check_key(key, name) for key in tree]
        return {key: name_tensors(tree[key], f"{name}.{key}", take, depth + 1) for key in keys}
    if type(tree) in (list, tuple):
        return type(tree)(name_tensors(item, f"{name}.{i}", take, depth + 1) for i, item in enumerate(tree))
    if isinstance(tree, (*PLAIN, *types_of("dtype", "device", "Size"))):
        return tree
    return Slot(name=take(name, tree))


def _check_key(key: Any, name: str) -> Any:
    """A name is put together of all keys above a tensor, so that none may be longer than a name."""
    if isinstance(key, (int, float, type(None))) or (isinstance(key, str) and len(key) <= MAX_NAME):
        return key
    raise DumpError(f"{name!r} holds a key that is neither a short text nor a number.", remedy=AS_WRITTEN)


def slots(tree: Any) -> Iterator[str]:
    """The names of all tensors of a tree."""
    if isinstance(tree, Slot):
        yield tree.name
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from slots(item)
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from slots(item)


def is_plain_dict(tree: Any) -> bool:
    """Whether a tree is a dict as it was saved, and does not stand for an object."""
    return isinstance(tree, dict) and KIND not in tree


def is_plain_data(value: Any) -> bool:
    """Tell whether this is numbers and texts alone, or in lists, tuples and dicts that go by texts or numbers."""
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and is_plain_data(item) for key, item in value.items())
    return isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_plain_data, value)))
