"""Copy, before each forward, the tensors that no optimizer writes: buffers, and parameters without gradients."""

from __future__ import annotations

from collections.abc import Callable, Set
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.joined import JoinOrder, can_join
from nandoctor.capture.updates import has_room
from nandoctor.torch_compat import buffers_of, parameters_of, versions_of

_SMALL_NBYTES = 1 << 20
"""The largest buffer that is copied however little room there is: running statistics have some kilobytes."""

Place = tuple[str, dict[str, Any], str]
"""A tensor's path in the model, its module's registry, and its name there."""

Tensors = tuple[torch.Tensor | None, ...]


def places_of(model: nn.Module, registry_of: Callable[[nn.Module], Any]) -> list[Place]:
    """Return the places of all parameters, or of all buffers; those of TorchScript are outside of Python."""
    registries = [(path, registry_of(module)) for path, module in model.named_modules()]
    return [
        (f"{path}.{name}" if path else name, registry, name)
        for path, registry in registries
        if isinstance(registry, dict)
        for name in registry
    ]


class SnapshotPlan:
    """The tensors to copy before a forward, by their index; of all others it is noted whether they are written."""

    def __init__(self, tensors: Tensors, chosen: Set[int]) -> None:
        self.tensors = tensors
        held = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None}
        present = {index: tensor for index, tensor in held.items() if has_values(tensor)}
        self.is_final = len(held) == len(present)  # the same tensors get their values in the first forward
        joined = [index for index in present if index in chosen and can_join(present[index])]
        self._odd = {index: present[index] for index in present if index in chosen and not can_join(present[index])}
        # Inference tensors have no version counter.
        self._watched = {i: tensor for i, tensor in present.items() if i not in chosen and not tensor.is_inference()}
        self._order = JoinOrder([present[index] for index in joined])
        self._joined = {joined[place]: present[joined[place]] for place in self._order.places}

    def take(self) -> Snapshot:
        """Return a snapshot of the tensors."""
        return Snapshot(
            plan=self,
            stamps=self._stamps(),
            joined=self._order.copy([*self._joined.values()]),
            odd={index: tensor.detach().clone() for index, tensor in self._odd.items()},
        )

    def copies(self, snapshot: Snapshot) -> dict[int, torch.Tensor]:
        """Return the copies by index among the tensors."""
        return snapshot.odd | dict(zip(self._joined, self._order.split(snapshot.joined), strict=True))

    def rewritten(self, snapshot: Snapshot) -> list[int]:
        """Return the indices of the tensors that have other stamps now."""
        return [i for i, old, new in zip(self._watched, snapshot.stamps, self._stamps(), strict=True) if old != new]

    def _stamps(self) -> list[tuple[int, int]]:
        """Return what a write changes, except in place through `.data` and numpy: the version or the memory."""
        watched = [*self._watched.values()]
        return [*zip(versions_of(watched), map(torch.Tensor.data_ptr, watched), strict=True)]


class Snapshot(NamedTuple):
    """The state before one forward: copies of some tensors, stamps of the others."""

    plan: SnapshotPlan
    stamps: list[tuple[int, int]]
    joined: list[torch.Tensor]
    odd: dict[int, torch.Tensor]


class StateKeeper:
    """A record of the buffers, and of the parameters without gradients, as they were before a forward.

    The forward may write them (running statistics, a queue, a momentum encoder), and so may the loop before the step is
    decided.
    """

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        buffers = places_of(model, buffers_of)
        held = [(place, place[1][place[2]]) for place in places_of(model, parameters_of)]
        frozen = [place for place, parameter in held if parameter is not None and not parameter.requires_grad]
        self._names = [path for path, *_ in (*buffers, *frozen)]
        self._registries = [registry for _, registry, _ in (*buffers, *frozen)]
        self._own_names = [name for *_, name in (*buffers, *frozen)]
        self._num_buffers, self._undo_nbytes = len(buffers), undo_nbytes
        self._plan: SnapshotPlan | None = None

    def keep(self) -> Snapshot:
        """Return a snapshot of the current state."""
        tensors: Tensors = tuple(map(dict.get, self._registries, self._own_names))
        if self._plan is None or not (self._plan.is_final and all(map(is_, tensors, self._plan.tensors))):
            self._plan = SnapshotPlan(tensors, self._choose(tensors))
        return self._plan.take()

    def _choose(self, tensors: Tensors) -> Set[int]:
        """Return the indices of the tensors to copy: of all if there is room, else of the small buffers."""
        present = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None and has_values(tensor)}
        if has_room([*present.values()], self._undo_nbytes):
            return present.keys()
        return {i for i, tensor in present.items() if i < self._num_buffers and tensor.nbytes <= _SMALL_NBYTES}

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return a snapshot's tensors by name, and the names of tensors that were overwritten without a copy."""
        plan = snapshot.plan
        buffers = enumerate(plan.tensors[: self._num_buffers])
        held = {index: tensor for index, tensor in buffers if tensor is not None} | plan.copies(snapshot)
        lost = plan.rewritten(snapshot)
        return {self._names[index]: tensor for index, tensor in held.items()}, [self._names[index] for index in lost]


def has_values(tensor: torch.Tensor) -> bool:
    """Return False for tensors on the meta device and for lazy ones."""
    return not tensor.is_meta and not is_lazy(tensor)
