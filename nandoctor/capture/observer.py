"""Record the state before a forward: modes, random generators, autocast, and copies of what no optimizer writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.environment import Generators, read_autocast
from nandoctor.capture.tensors import (
    JoinOrder,
    can_join,
    describe_mixed_precision,
    describe_shard,
    is_sharded,
    local_part,
)
from nandoctor.capture.updates import has_room
from nandoctor.torch_compat import buffers_of, parameters_of, versions_of

_FLAG = itemgetter("training")


class StateBefore(NamedTuple):
    """The state before the forward; `training` has the train flags in the order of the model's modules."""

    kept: _Snapshot
    training: tuple[bool, ...]
    autocast: dict[str, Any]


class Observer:
    """A reader of a model's state before its forward, with a cache of what does not change from step to step."""

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        self.model, self.undo_nbytes = model, undo_nbytes
        self.sharded = any(map(is_sharded, model.parameters()))
        self._paths, self._modules = zip(*model.named_modules(), strict=True)
        self._attributes = list(map(vars, self._modules))
        self._keeper = StateKeeper(model, undo_nbytes)
        weights = [place for place in _places_of(model, parameters_of) if place[1][place[2]] is not None]
        trained = [place for place in weights if _is_trained(place)]
        self._first = [*weights, *_places_of(model, buffers_of)][:1]
        self._ends = [*trained[:1], *trained[-1:]]
        self.device, self.generators = torch.device("cpu"), Generators()
        self.autocast_inside: dict[str, Any] | None = None
        self._follow_device()

    def _follow_device(self) -> None:
        """Update the device: the model may be moved after its recorder was made."""
        for _, registry, name in self._first:
            first = registry.get(name)
            if first is not None and first.device != self.device and not first.is_meta:
                self.device = first.device

    def look(self) -> StateBefore:
        """Return the current state."""
        self._follow_device()
        return StateBefore(
            kept=self._keeper.keep(),
            training=self._read_flags(),
            autocast=read_autocast(self.device.type),
        )

    def _read_flags(self) -> tuple[bool, ...]:
        """Return the train flags, from the modules' instance dicts: that is faster than a lookup through the class."""
        try:
            return tuple(map(_FLAG, self._attributes))
        except KeyError:  # TorchScript keeps its flags outside of Python, and a class may have a property
            return tuple(module.training for module in self._modules)

    @property
    def has_lent_weights(self) -> bool:
        """True while `torch.func.functional_call` has put other tensors in place of the model's parameters."""
        return any(not isinstance(registry.get(name), nn.Parameter) for _, registry, name in self._ends)

    def stamp(self) -> list[Stamp] | None:
        """Return the stamps of the first and the last trained weight.

        None if it cannot tell: FSDP itself moves the weights, and a function may have lent them to the model.
        """
        if self.sharded or self.has_lent_weights:
            return None
        return _stamps_of([registry[name] for _, registry, name in self._ends])

    def was_written(self, stamp: list[Stamp] | None) -> bool:
        """Return True if the weights were written since, as far as the stamp shows."""
        now = self.stamp()
        return stamp is not None and now is not None and stamp != now

    def describe(self, before: StateBefore, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
        """Return a dump's entries for the state before the forward, and notes on what could not be kept.

        `weights` has copies, from before the forward, of weights that were written since.
        """
        model = self.model
        is_same = tuple(model.modules()) == self._modules
        copies, lost = before.kept() if is_same else ({}, [])
        kept = {**weights, **copies}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tied = {id(tensor): kept[name] for name, tensor in named if name in kept}
        kept |= {name: tied[id(tensor)] for name, tensor in named if id(tensor) in tied}
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        state = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in state]
        contents = {
            "state_dict": {name: kept[name] if name in kept else local_part(value) for name, value in state.items()},
            "shards": {name: describe_shard(tensor) for name, tensor in state.items() if is_sharded(tensor)},
            "buffers": buffers,
            "training": dict(zip(self._paths, before.training, strict=True)),
            "mixed_precision": describe_mixed_precision(model),
            "autocast": before.autocast if before.autocast["enabled"] else self.autocast_inside or before.autocast,
        }
        if not is_same:
            return contents, ["the modules of the step: some were added or taken out after the recorder was made"]
        lost += [name for name in buffers if name not in kept]  # those of TorchScript
        return contents, [
            f"state_dict.{name}: the file has its value from after the forward, not before it" for name in lost
        ]


def _is_trained(place: _Place) -> bool:
    """Return True for a weight that requires gradients and whose values can be read."""
    _, registry, name = place
    held = registry[name]
    if not isinstance(held, nn.Parameter) or not held.requires_grad or not can_join(held):
        return False
    return not held.is_meta and not held.is_inference()


_SMALL_NBYTES = 1 << 20
"""The largest buffer that is copied however little room there is: running statistics have some kilobytes."""

_Place = tuple[str, dict[str, Any], str]
"""A tensor's path in the model, its module's registry, and its name there."""

Tensors = tuple[torch.Tensor | None, ...]
State = tuple[dict[str, torch.Tensor], list[str]]
_Snapshot = Callable[[], State]
"""Returns tensors by name as they were before a forward, and the names of those overwritten without a copy."""
Stamp = tuple[int, int]


def _stamps_of(tensors: Sequence[torch.Tensor]) -> list[Stamp]:
    """Return what a write changes, except in place through `.data` and numpy: each one's version and memory."""
    return [*zip(versions_of(tensors), map(torch.Tensor.data_ptr, tensors), strict=True)]


def _places_of(model: nn.Module, registry_of: Callable[[nn.Module], Any]) -> list[_Place]:
    """Return the places of all parameters, or of all buffers; those of TorchScript are outside of Python."""
    registries = [(path, registry_of(module)) for path, module in model.named_modules()]
    return [
        (f"{path}.{name}" if path else name, registry, name)
        for path, registry in registries
        if isinstance(registry, dict)
        for name in registry
    ]


class _SnapshotPlan:
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

    def take(self) -> _Snapshot:
        """Return a snapshot of the tensors."""
        return partial(self._state, _stamps_of([*self._watched.values()]), self._order.copy([*self._copied.values()]))

    def _state(self, stamps: Sequence[Stamp], joined: Sequence[torch.Tensor]) -> State:
        copies = dict(zip(self._copied, self._order.split(joined), strict=True))
        stamped = zip(self._watched, stamps, _stamps_of([*self._watched.values()]), strict=True)
        return self._buffers | copies, [name for name, before, now in stamped if before != now]


class StateKeeper:
    """A record of the buffers, and of the parameters without gradients, as they were before a forward.

    The forward may write them (running statistics, a queue, a momentum encoder), and so may the loop before the step is
    decided.
    """

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        buffers = _places_of(model, buffers_of)
        held = [(place, place[1][place[2]]) for place in _places_of(model, parameters_of)]
        frozen = [place for place, parameter in held if parameter is not None and not parameter.requires_grad]
        self._names = [path for path, *_ in (*buffers, *frozen)]
        self._registries = [registry for _, registry, _ in (*buffers, *frozen)]
        self._own_names = [name for *_, name in (*buffers, *frozen)]
        self._num_buffers, self._undo_nbytes = len(buffers), undo_nbytes
        self._plan: _SnapshotPlan | None = None

    def keep(self) -> _Snapshot:
        """Return a snapshot of the current state."""
        tensors: Tensors = tuple(map(dict.get, self._registries, self._own_names))
        if self._plan is None or not (self._plan.is_final and all(map(is_, tensors, self._plan.tensors))):
            self._plan = _SnapshotPlan(self._names, tensors, self._num_buffers, self._undo_nbytes)
        return self._plan.take()
