"""The arrays of a dump in the containers that they were saved in, as the training loop passed them around.

In: the tree of a dump. Out: its containers by name, the loop's batch, and functions that are given it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.trees import Slot, fill
from nandoctor.replaying.recorded_step import make_batch

_CONTAINERS = (dict, list, tuple)

MakeBatch = Callable[[Mapping[str, torch.Tensor]], Any]
"""Makes the loop's batch of the arrays by name."""


def batch_maker(dump: Dump, inputs: Collection[str], device: torch.device) -> MakeBatch:
    """What makes the batch that a loss or a call of the user's is given; `inputs` are the arrays that are no outputs.

    A recorder's file has it. Of any other it is the container that all inputs stand in, `batch` in `{"batch": {...},
    "logit": ...}`; where there is no such, all that was saved.
    """
    recorded = dump.recorded
    if recorded is not None:
        return lambda tensors: make_batch(recorded, tensors, device)
    tree = dump.tree if dump.tree is not None else {name: Slot(name=name) for name in dump.arrays}
    first = {name.partition(".")[0] for name in inputs}
    only = tree.get(next(iter(first))) if len(first) == 1 else None
    batch = only if isinstance(only, _CONTAINERS) else tree
    return lambda tensors: fill(batch, tensors, device)


def on_batch(function: Callable[..., Any], make: MakeBatch) -> Callable[..., Any]:
    """A user's function of something and the batch, made to take the arrays by name."""

    @functools.wraps(function)
    def take(first: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        return function(first, make(tensors))

    return take


def list_containers(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All containers below the root of a tree, by their dotted names."""
    items = enumerate(tree) if isinstance(tree, (list, tuple)) else tree.items() if isinstance(tree, dict) else ()
    for key, item in items:
        if isinstance(item, _CONTAINERS):
            path = f"{name}.{key}" if name else str(key)
            yield path, item
            yield from list_containers(item, path)


def describe_batch(batch: Any) -> str:
    """What a function was given, in words: "batch has image, targets"."""
    if isinstance(batch, Mapping):
        return f"batch has {', '.join(map(str, batch)) or 'nothing in it'}"
    if isinstance(batch, (list, tuple)):
        return f"batch is a {type(batch).__name__} of {len(batch)}"
    return f"batch is a {type(batch).__name__}"
