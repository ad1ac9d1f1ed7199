"""Copy, before each forward, the tensors that no optimizer writes: buffers, and parameters without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.joined import JoinOrder
from nandoctor.capture.updates import has_room
from nandoctor.torch_compat import buffers_of, parameters_of, versions_of

_SMALL_NBYTES = 1 << 20
"""The largest buffer that is copied however little room there is: running statistics have some kilobytes."""

Place = tuple[str, dict[str, Any], str]
"""A tensor's path in the model, its module's registry, and its name there."""

Tensors = tuple[torch.Tensor | None, ...]
State = tuple[dict[str, torch.Tensor], list[str]]
Snapshot = Callable[[], State]
"""Returns tensors by name as they were before a forward, and the names of those overwritten without a copy."""
Stamp = tuple[int, int]


def stamps_of(tensors: Sequence[torch.Tensor]) -> list[Stamp]:
    """Return what a write changes, except in place through `.data` and numpy: each one's version and memory."""
    return [*zip(versions_of(tensors), map(torch.Tensor.data_ptr, tensors), strict=True)]


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
    """The tensors to copy before a forward; of all others it is noted whether they are written.

    All are copied if there is room, else only the small ones among the buffers, which have the first names.
    """

    def __init__(self, names: Sequence[str], tensors: Tensors, num_buffers: int, undo_nbytes: int) -> None:
        self.tensors = tensors
        held = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
        present = {name: tensor for name, tensor in held.items() if not tensor.is_meta and not is_lazy(tensor)}
        self.is_final = len(held) == len(present)  # the same tensors get their values in the first forward
        self._buffers = {name: held[name] for name in names[:num_buffers] if name in held}
        chosen = [*present]
        if not has_room([*present.values()], undo_nbytes):
            chosen = [name for name in present if name in self._buffers and present[name].nbytes <= _SMALL_NBYTES]
        self._order = JoinOrder([present[name] for name in chosen])
        self._copied = {chosen[place]: present[chosen[place]] for place in self._order.places}
        others = {name: tensor for name, tensor in present.items() if name not in self._copied}
        # Inference tensors have no version counter.
        self._watched = {name: tensor for name, tensor in others.items() if not tensor.is_inference()}

    def take(self) -> Snapshot:
        """Return a snapshot of the tensors."""
        return partial(self._state, stamps_of([*self._watched.values()]), self._order.copy([*self._copied.values()]))

    def _state(self, stamps: Sequence[Stamp], joined: Sequence[torch.Tensor]) -> State:
        copies = dict(zip(self._copied, self._order.split(joined), strict=True))
        stamped = zip(self._watched, stamps, stamps_of([*self._watched.values()]), strict=True)
        return self._buffers | copies, [name for name, before, now in stamped if before != now]


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
            self._plan = SnapshotPlan(self._names, tensors, self._num_buffers, self._undo_nbytes)
        return self._plan.take()
