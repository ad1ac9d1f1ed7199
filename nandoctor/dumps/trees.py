"""Arguments, batches and outputs in a file: trees of plain containers, with a name in place of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nandoctor.dumps.stored_tensor import TorchName
from nandoctor.errors import DumpError
from nandoctor.trees import PLAIN, Place, placed_map, walk

KIND = "<type>"
"""The key of the class's name, beside the fields of anything but a plain container."""
PACKED_SEQUENCE = "tuple:torch.nn.utils.rnn.PackedSequence"
MAX_NAME = 512
AS_WRITTEN = "Use the file as the recorder wrote it."
"""The remedy if a file does not match its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A placeholder in a tree for the tensor of that name among a dump's arrays."""

    name: str


def name_tensors(tree: Any, name: str, take: Callable[[str, Any], str]) -> Any:
    """Return the tree with a `Slot` for each tensor, under the name that `take(name, tensor)` returns.

    Raises DumpError if the tree is nested too deeply, or holds what no writer of dumps puts there.
    """
    others: tuple[type[Any], ...] = (*PLAIN, list, tuple, dict, TorchName)

    def name_tensor(place: Place, item: Any) -> Any:
        # The name of a tensor is made of all keys above it.
        if isinstance(item, dict) and not all(map(_is_part_of_a_name, item)):
            raise DumpError(f"{name!r} holds a key that is neither a short string nor a number.", remedy=AS_WRITTEN)
        return item if isinstance(item, others) else Slot(name=take(".".join([name, *map(str, place)]), item))

    try:
        return placed_map(name_tensor, tree)
    except RecursionError as error:
        raise too_large() from error


def too_large() -> DumpError:
    """Return the error for contents that are nested without end, or that are too many."""
    return DumpError(
        "it is nested too deeply, or holds more values than any training step does.",
        remedy="Save the tensors of the failing step in one flat dict, with model.state_dict() as the weights.",
    )


def _is_part_of_a_name(key: Any) -> bool:
    return isinstance(key, (int, float, type(None))) or (isinstance(key, str) and len(key) <= MAX_NAME)


def slots(tree: Any) -> Iterator[str]:
    """Yield the names of all tensors in a tree."""
    return (item.name for _, item in walk(tree) if isinstance(item, Slot))


def is_plain_dict(tree: Any) -> bool:
    """Return True if a tree is a dict as it was saved, and does not stand for an object."""
    return isinstance(tree, dict) and KIND not in tree


def is_plain_data(value: Any) -> bool:
    """Return True for numbers and strings, alone or in lists, tuples and dicts with strings or integers as keys."""
    found = [item for _, item in walk(value)]
    keys = [key for item in found if isinstance(item, Mapping) for key in item]
    return all(isinstance(item, (*PLAIN, Mapping, list, tuple)) for item in found) and all(
        isinstance(key, (str, int)) for key in keys
    )


def holds_objects(value: Any) -> bool:
    """Return True if a tree has an entry that stands for an object."""
    return any(isinstance(item, Mapping) and KIND in item for _, item in walk(value))
