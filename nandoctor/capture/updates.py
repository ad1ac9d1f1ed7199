"""Measure gradients before an optimizer's update and weights after it, and copy the weights from before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nandoctor.capture.async_flags import Flag, all_finite
from nandoctor.capture.deepspeed import DeepSpeedEngine
from nandoctor.capture.joined import JoinOrder, can_join
from nandoctor.capture.sharding import is_sharded, local_part
from nandoctor.machine import memory_of
from nandoctor.torch_compat import copy_tensors, infinity_norms, sparse_values

_GRAD = attrgetter("grad")
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
    optimizer: Any
    gradients: Flag | None
    undo: Mapping[str, torch.Tensor] | None
    groups: Sequence[Mapping[str, Any]] = ()
    weights: Flag | None = None

    @property
    def writer(self) -> str:
        """The optimizer's class name; "" if the loop itself had spoiled weights before the update."""
        return type(self.optimizer).__name__ if all_finite((self.undo or {}).values()) else ""

    def settings(self) -> dict[str, float]:
        """Return the numeric settings of the groups: for each name the first non-finite value, else the last.

        Settings in tensors are left out if the flag of the weights arrives late (from a GPU): by then a schedule may
        have written the next value into them.
        """
        found: dict[str, float] = {}
        late = self.weights is None or self.weights.on_device
        for group in self.groups:
            for name, value in group.items():
                plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 and not late else value
                if type(plain) in (int, float) and math.isfinite(found.get(name, 0.0)):
                    found[name] = float(plain)
        return found


class TrainingLoop:
    """A stand-in for the optimizer of a loop that writes the weights itself; it is never reported as the writer."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict without settings and state, which only the loop knows."""
        return {"state": {}, "param_groups": [{"params": list(range(len(self.param_groups[0]["params"])))}]}


class TrainedParameters:
    """The parameters of a model that one optimizer trains.

    Those that are non-finite before its first update are left out: the infinity is intended, or came with a checkpoint,
    so no update is to blame for it. If `sharded`, each rank holds and measures its own part of them.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str], undo_nbytes: int) -> None:
        self._optimizer = ref(optimizer) if isinstance(optimizer, Optimizer) else lambda: optimizer
        self._known_outline = _outline(optimizer)
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        # No update writes lazy parameters that are not initialized yet, nor one-byte floats.
        written = (p for p in trained if not is_lazy(p) and not (p.is_floating_point() and p.element_size() == 1))
        owned = [(names[id(p)], p) for p in written if id(p) in names]
        found = largest_magnitude([parameter for _, parameter in owned])
        if found is not None and not bool(found.isfinite()):
            owned = [(name, p) for name, p in owned if not _num_nonfinite(p)]
        self.names = tuple(name for name, _ in owned)
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in owned]
        self.sharded = any(map(is_sharded, self.parameters))
        self._joint = self._join() if all(map(_is_on_cpu, self.parameters)) else None
        self._format = self._read_format()
        self._copies = self._make_copies(undo_nbytes)
        split = self._copies if self._joint is None or self._copies is None else self._joint.split(self._copies)
        self._undo = None if split is None else dict(zip(self.names, split, strict=True))

    def _join(self) -> JoinOrder:
        """Sort the parameters into an order in which a few calls can copy and measure them."""
        joint = JoinOrder(self.parameters)
        self.names = tuple(self.names[place] for place in joint.places)
        self.parameters = [self.parameters[place] for place in joint.places]
        return joint

    @property
    def optimizer(self) -> Any:
        """The optimizer, None once the loop has dropped it: a meta-learner makes one for each task."""
        return self._optimizer()

    @property
    def is_current(self) -> bool:
        """False once the optimizer has other parameters, or the model was moved or cast."""
        return self._known_outline == _outline(self.optimizer) and self._format == self._read_format()

    def _read_format(self) -> tuple[torch.device, torch.dtype] | None:
        return (self.parameters[0].device, self.parameters[0].dtype) if self.parameters else None

    def gradients(self) -> torch.Tensor | float | None:
        """Return the largest magnitude among the gradients, NaN if one is NaN; None without gradients."""
        return self._measure(list(map(_GRAD, self.parameters)))

    def weights(self) -> torch.Tensor | float | None:
        """Return the largest magnitude among the weights, NaN if one is NaN; None without weights."""
        return self._measure(self.parameters)

    def _measure(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | float | None:
        if self._joint is not None:
            try:
                return self._joint.largest(tensors)
            except RuntimeError:  # sparse gradients cannot be joined
                pass
        return largest_magnitude([tensor for tensor in tensors if tensor is not None])

    def keep(self) -> Mapping[str, torch.Tensor] | None:
        """Copy the weights, so that the dump can have those from before an update; None if there is no room."""
        if self._copies is None:
            return None
        if self._joint is not None:
            self._joint.copy(self.parameters, self._copies)
        else:
            with torch.no_grad():
                copy_tensors(self._copies, list(map(local_part, self.parameters)))
        return self._undo

    def _make_copies(self, undo_nbytes: int) -> list[torch.Tensor] | None:
        parts = [local_part(parameter) for parameter in self.parameters]
        if not has_room(parts, undo_nbytes):
            return None
        try:
            return [torch.empty_like(part) for part in parts] if self._joint is None else self._joint.copy(parts)
        except torch.OutOfMemoryError:
            return None

    def nonfinite(self) -> dict[str, list[int]]:
        """Return non-finite and total counts of each parameter that is non-finite now; waits for the device."""
        counts = {name: [_num_nonfinite(p), p.numel()] for name, p in zip(self.names, self.parameters, strict=True)}
        return {name: numbers for name, numbers in counts.items() if numbers[0]}


def has_room(tensors: Sequence[torch.Tensor], undo_nbytes: int) -> bool:
    """Return True if copies of the tensors are small enough to be kept all the time."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}  # a CPU's memory is less scarce
    bounds = [_UNDO_SHARE * torch.cuda.get_device_properties(device).total_memory for device in devices]
    return memory_of(tensors) <= min([undo_nbytes, *bounds])


def largest_magnitude(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest magnitude of all elements as a scalar on the device, NaN if one is NaN; None without any."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        plain = tensor if can_join(tensor) else _plain(tensor)
        if plain.numel():
            groups.setdefault((plain.device, plain.dtype), []).append(plain)
    if not groups:
        return None
    with torch.no_grad():
        found = [bound for group in groups.values() for bound in _bounds_of(group)]
        wide = torch.float64 if any(bound.dtype == torch.float64 for bound in found) else torch.float32
        bounds = [bound.to(found[0].device, wide) for bound in found]
        return bounds[0] if len(bounds) == 1 else torch.stack(bounds).abs().amax()


def _bounds_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return scalars, one of which has the largest magnitude; if there is one scalar only, it is the magnitude."""
    if tensors[0].is_complex():
        tensors = [torch.view_as_real(tensor) for tensor in tensors]
    if tensors[0].is_cuda:
        return [torch.stack(infinity_norms(tensors)).amax()]
    return [bound for tensor in tensors for bound in torch.aminmax(tensor)]


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    """Return True for dense real tensors on a CPU, which are put into groups once and not at each step."""
    return tensor.device.type == "cpu" and can_join(tensor) and tensor.is_floating_point()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient or weight: the values of a sparse one, this rank's part of a sharded one."""
    local = local_part(tensor)
    return sparse_values(local) if local.is_sparse else local


def _num_nonfinite(tensor: torch.Tensor) -> int:
    return int((~_plain(tensor).isfinite()).sum())


def _outline(optimizer: Optimizer | DeepSpeedEngine) -> list[tuple[int, int]]:
    """Return each group's number of parameters and the id of its first: pruning Gaussian splats makes new ones."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [(len(group), id(group[0]) if group else 0) for group in groups]
