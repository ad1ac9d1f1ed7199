"""The arrays of a dump, and the containers that they were saved in, as the training loop passed them around.

In: a `Dump`, its model and the names of its outputs. Out: `SavedBatch`, and functions that are given the loop's batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.trees import Slot, fill, slots
from nandoctor.replaying.recorded_step import make_batch

_CONTAINERS = (dict, list, tuple)

MakeBatch = Callable[[Mapping[str, torch.Tensor]], Any]
"""Makes the loop's batch of the arrays by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """Every array of a dump on the replay's device, and what may go into the model.

    That are the `inputs`, which are the arrays that are no outputs, the plain `scalars`, and the `containers` of both
    as trees, all by name. `make` gives the batch that a loss or a call of the user's is given.
    """

    arrays: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    containers: Mapping[str, Any]
    make: MakeBatch
    notes: tuple[str, ...] = ()

    def on_loop_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A user's function of something and the batch, made to take the arrays by name."""

        @functools.wraps(function)
        def take(first: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
            return function(first, self.make(tensors))

        return take


def read_batch(dump: Dump, model: nn.Module, outputs: Collection[str], device: torch.device) -> SavedBatch:
    """The batch of a dump on the device.

    A recorder's file has the formats of the training. In any other, float64 is what numpy made of float32, unless the
    model is in float64 itself.
    """
    keeps_float64 = dump.recorded is not None or any(item.dtype == torch.float64 for item in model.parameters())
    narrowed = [name for name, array in dump.arrays.items() if array.dtype == torch.float64 and not keeps_float64]
    arrays = {
        name: array.to(device, torch.float32 if name in narrowed else array.dtype)
        for name, array in dump.arrays.items()
    }
    inputs = {name: array for name, array in arrays.items() if name not in outputs}
    return SavedBatch(
        arrays=arrays,
        inputs=inputs,
        scalars=dump.scalars,
        containers=_containers(dump.tree, outputs),
        make=_batch_maker(dump, inputs, device),
        notes=tuple(
            f"{name} was saved as float64 and went in as float32, the model's own precision." for name in narrowed
        ),
    )


def _batch_maker(dump: Dump, inputs: Collection[str], device: torch.device) -> MakeBatch:
    """A recorder's file has the loop's batch.

    Of any other it is the container that all inputs stand in, `batch` in `{"batch": {...}, "logit": ...}`; where there
    is no such, all that was saved.
    """
    recorded = dump.recorded
    if recorded is not None:
        return lambda tensors: make_batch(recorded, tensors, device)
    tree = dump.tree if dump.tree is not None else {name: Slot(name=name) for name in dump.arrays}
    first = {name.partition(".")[0] for name in inputs}
    only = tree.get(next(iter(first))) if len(first) == 1 else None
    batch = only if isinstance(only, _CONTAINERS) else tree
    return lambda tensors: fill(batch, tensors, device)


def _containers(tree: Any, outputs: Collection[str]) -> dict[str, Any]:
    """The containers that hold arrays, and no output."""
    found = ((name, item, list(slots(item))) for name, item in _list_containers(tree))
    return {name: item for name, item, arrays in found if arrays and not set(arrays).intersection(outputs)}


def _list_containers(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All containers below the root of a tree, by their dotted names."""
    items = enumerate(tree) if isinstance(tree, (list, tuple)) else tree.items() if isinstance(tree, dict) else ()
    for key, item in items:
        if isinstance(item, _CONTAINERS):
            path = f"{name}.{key}" if name else str(key)
            yield path, item
            yield from _list_containers(item, path)


def describe_batch(batch: Any) -> str:
    """What a function was given, in words: "batch has image, targets"."""
    if isinstance(batch, Mapping):
        return f"batch has {', '.join(map(str, batch)) or 'nothing in it'}"
    if isinstance(batch, (list, tuple)):
        return f"batch is a {type(batch).__name__} of {len(batch)}"
    return f"batch is a {type(batch).__name__}"
