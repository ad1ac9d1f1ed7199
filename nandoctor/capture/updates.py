"""Measure gradients before an optimizer's update and weights after it, and copy the weights from before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nandoctor.capture.tensors import Flag, JoinOrder, can_join, is_sharded, largest_magnitude, local_part, plain_part
from nandoctor.machine import memory_of
from nandoctor.torch_compat import copy_tensors

UNDO_NBYTES = 1 << 30
_UNDO_SHARE = 0.02
"""The largest share of a device's memory for a copy of the weights; more might take what the training needs."""


@dataclass(slots=True, kw_only=True)
class Update:
    """One write of an optimizer to the weights.

    `gradients` and `weights` are the largest magnitudes of the gradients before it and of the weights after it. `undo`
    has the weights from before it, None if they were not copied; the optimizer's next update overwrites it. `groups`
    are copies of the optimizer's param groups: a schedule may change the originals before the flags arrive.
    """

    trained: TrainedParameters
    optimizer: Optimizer
    groups: Sequence[Mapping[str, Any]]
    gradients: Flag | None = None
    undo: Mapping[str, torch.Tensor] | None = None
    weights: Flag | None = None


class TrainedParameters:
    """Some parameters of a model, to be copied and measured together.

    Those that are non-finite at first are left out: the infinity is intended, or came with a checkpoint, so no update
    is to blame for it. If `sharded`, each rank holds and measures its own part of them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], undo_nbytes: int) -> None:
        # No update writes lazy parameters, which have no shape, nor one-byte floats.
        made = {name: parameter for name, parameter in parameters.items() if not is_lazy(parameter)}
        owned = {name: it for name, it in made.items() if not it.is_floating_point() or it.element_size() > 1}
        found = largest_magnitude(owned.values())
        if found is not None and not bool(found.isfinite()):
            owned = {name: parameter for name, parameter in owned.items() if not _num_nonfinite(parameter)}
        self.names, self.parameters = tuple(owned), list(owned.values())
        self.sharded = any(map(is_sharded, self.parameters))
        self._joint: JoinOrder | None = None
        # Dense real tensors on a CPU are put into groups once: in an order in which a few calls copy and measure them.
        if all(it.device.type == "cpu" and can_join(it) and it.is_floating_point() for it in self.parameters):
            self._joint = JoinOrder(self.parameters)
            self.names = tuple(self.names[place] for place in self._joint.places)
            self.parameters = [self.parameters[place] for place in self._joint.places]
        parts = [local_part(parameter) for parameter in self.parameters]
        self._copies: dict[str, torch.Tensor] | None = None
        if has_room(parts, undo_nbytes):
            with suppress(torch.OutOfMemoryError):
                self._copies = {name: torch.empty_like(part) for name, part in zip(self.names, parts, strict=True)}

    def gradients(self) -> torch.Tensor | float | None:
        """Return the largest magnitude among the gradients, NaN if one is NaN; None without gradients."""
        return self._measure([parameter.grad for parameter in self.parameters])

    def weights(self) -> torch.Tensor | float | None:
        """Return the largest magnitude among the weights, NaN if one is NaN; None without weights."""
        return self._measure(self.parameters)

    def _measure(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | float | None:
        if self._joint is not None:
            try:
                return self._joint.largest(tensors)
            except RuntimeError:  # sparse gradients cannot be joined
                pass
        return largest_magnitude(tensor for tensor in tensors if tensor is not None)

    def keep(self) -> Mapping[str, torch.Tensor] | None:
        """Copy the weights, so that the dump can have those from before an update; None if there is no room."""
        if self._copies is not None:
            parts = list(map(local_part, self.parameters)) if self.sharded else self.parameters
            with torch.no_grad():
                copy_tensors([*self._copies.values()], parts)
        return self._copies

    def nonfinite(self) -> dict[str, list[int]]:
        """Return non-finite and total counts of each parameter that is non-finite now; waits for the device."""
        counts = {name: [_num_nonfinite(p), p.numel()] for name, p in zip(self.names, self.parameters, strict=True)}
        return {name: numbers for name, numbers in counts.items() if numbers[0]}


class Trainers:
    """The parameters of the model that each optimizer trains, found at the optimizer's first step.

    `probe` is the first parameter that requires gradients.
    """

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        self._model, self._undo_nbytes = model, undo_nbytes
        # An optimizer that the loop has dropped is forgotten: a meta-learner makes one for each task.
        self._trained: WeakKeyDictionary[Optimizer, tuple[object, TrainedParameters]] = WeakKeyDictionary()
        self._name_parameters()

    def _name_parameters(self) -> None:
        self._parameters = dict(self._model.named_parameters())
        self.probe = next((parameter for parameter in self._parameters.values() if parameter.requires_grad), None)
        self._all: TrainedParameters | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that train a parameter of the model, in the order of their first steps."""
        return [optimizer for optimizer, (_, trained) in self._trained.items() if trained.names]

    def find(self, optimizer: Optimizer) -> TrainedParameters:
        """Return the parameters of this model that the optimizer trains; cached until its parameters change."""
        outline, trained = self._trained.get(optimizer, (None, None))
        now = [_outline(group["params"]) for group in optimizer.param_groups]
        if trained is not None and outline == now:
            return trained
        self._name_parameters()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = {name: parameter for name, parameter in self._parameters.items() if id(parameter) in own}
        trained = TrainedParameters(found, self._undo_nbytes)
        self._trained[optimizer] = now, trained
        return trained

    def find_all(self) -> TrainedParameters:
        """Return all parameters that require gradients: a micro-batch may end before any optimizer was seen."""
        if self._all is None:
            trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
            self._all = TrainedParameters(trained, undo_nbytes=0)
        return self._all


def _outline(parameters: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return what differs after a group was given other parameters, or the model was moved or cast."""
    first = parameters[0] if parameters else None
    return len(parameters), id(first), getattr(first, "device", None), getattr(first, "dtype", None)


def has_room(tensors: Sequence[torch.Tensor], undo_nbytes: int) -> bool:
    """Return True if copies of the tensors are small enough to be kept all the time."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}  # a CPU's memory is less scarce
    bounds = [_UNDO_SHARE * torch.cuda.get_device_properties(device).total_memory for device in devices]
    return memory_of(tensors) <= min([undo_nbytes, *bounds])


def _num_nonfinite(tensor: torch.Tensor) -> int:
    return int((~plain_part(tensor).isfinite()).sum())
