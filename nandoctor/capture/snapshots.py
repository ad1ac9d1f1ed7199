"""Copy, before each forward, the tensors that forwards write: buffers, and parameters without gradients."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.async_flags import Flag
from nandoctor.capture.joined import JoinOrder, can_join
from nandoctor.capture.updates import has_room
from nandoctor.torch_compat import buffers_of, is_running_norm, parameters_of, versions_of

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
    """The tensors to copy before a forward, by their index; for all others the versions are kept.

    Writes through `.data` and numpy do not raise a version. With `checks` the copies are compared after the forward.
    """

    def __init__(self, tensors: Tensors, chosen: Set[int], *, checks: bool) -> None:
        self.tensors, self.checks = tensors, checks
        held = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None and not tensor.is_meta}
        present = {index: tensor for index, tensor in held.items() if not is_lazy(tensor)}
        joined = [index for index in present if index in chosen and can_join(present[index])]
        self._odd = [index for index in present if index in chosen and not can_join(present[index])]
        # Inference tensors have no version counter.
        self._watched = [i for i, tensor in present.items() if i not in chosen and not tensor.is_inference()]
        self._order = JoinOrder([present[index] for index in joined])
        self._joined = [joined[place] for place in self._order.places]
        self._sources = [present[index] for index in self._joined]
        self._counted = [present[index] for index in self._watched]

    def take(self) -> Snapshot:
        """Return a snapshot of the tensors."""
        odd = {i: tensor.detach().clone() for i in self._odd if (tensor := self.tensors[i]) is not None}
        joined = self._order.copy(self._sources)
        return Snapshot(plan=self, versions=versions_of(self._counted), joined=joined, odd=odd)

    def split(self, joined: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the copies by index among the tensors."""
        return dict(zip(self._joined, self._order.split(joined), strict=True))

    def rewritten(self, versions: list[int]) -> list[int]:
        """Return the indices of the tensors that now have other versions."""
        now = versions_of(self._counted)
        if now == versions:
            return []
        return [i for i, old, new in zip(self._watched, versions, now, strict=True) if old != new]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The state before one forward: copies of some tensors, versions of the others.

    `differs` says for each copy whether the tensor had changed when `compare` was called.
    """

    plan: SnapshotPlan
    versions: list[int]
    joined: list[torch.Tensor]
    odd: dict[int, torch.Tensor]
    differs: Flag | None = None

    def copies(self) -> dict[int, torch.Tensor]:
        """Return the copies by index among the tensors."""
        return self.odd | self.plan.split(self.joined)

    def compare(self) -> None:
        """If the plan checks values, flag the tensors whose values have changed since, counted or not."""
        copies = self.copies() if self.plan.checks else {}
        if not copies:
            return
        pairs = [(copy, now) for i, copy in copies.items() if (now := self.plan.tensors[i]) is not None]
        device = pairs[0][0].device
        self.differs = Flag(torch.stack([_differ(*pair).to(device) for pair in pairs]).float())

    def changed(self) -> list[int]:
        """Return the indices of the tensors that are known to have been written since."""
        counted = self.plan.rewritten(self.versions)
        if self.differs is None:
            return counted
        return counted + [i for i, differs in zip(self.copies(), self.differs.values(), strict=True) if differs]


def _differ(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return on the device whether values differ, NaNs being equal; True if they cannot be compared."""
    try:
        return ((before != after) & ~(before.isnan() & after.isnan())).any()
    except RuntimeError:  # the shape has changed, or torch has no ops for the dtype
        return torch.tensor(True)


class StateKeeper:
    """A record of what forwards write: the running statistics of norms, and all that was seen to change.

    It watches buffers and the parameters without gradients: a contrastive model's forward writes its momentum encoder.
    Values are compared at the first forward, and then at the 2nd, 4th, 8th and so on.
    """

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        buffers = places_of(model, buffers_of)
        held = [(place, place[1][place[2]]) for place in places_of(model, parameters_of)]
        frozen = [place for place, parameter in held if parameter is not None and not parameter.requires_grad]
        places = [*buffers, *frozen]
        self._names = [path for path, *_ in places]
        self.buffers = tuple(self._names[: len(buffers)])
        self._frozen = frozenset(range(len(buffers), len(places)))
        self._registries = [registry for _, registry, _ in places]
        self._own_names = [name for *_, name in places]
        norms = {id(buffers_of(module)) for module in model.modules() if is_running_norm(module)}
        self._written = {index for index, (_, registry, _) in enumerate(buffers) if id(registry) in norms}
        self._undo_nbytes = undo_nbytes
        self._num_taken = 0
        self._last: Snapshot | None = None

    def keep(self) -> Snapshot:
        """Return a snapshot of the current state."""
        if not self._names and self._last is not None:
            return self._last
        self._num_taken += 1
        tensors: Tensors = tuple(map(dict.get, self._registries, self._own_names))
        self._last = self._plan_for(tensors).take()
        return self._last

    def _plan_for(self, tensors: Tensors) -> SnapshotPlan:
        """Return a plan that copies all tensors that were seen to be written: the last plan if it still does."""
        last, checks = self._last, self._num_taken & (self._num_taken - 1) == 0
        changed = [] if last is None else last.changed()
        if last is not None and last.plan.checks:  # the loop may have written since the forward
            last.compare()
            changed += last.changed()
        is_same = last is not None and all(map(is_, tensors, last.plan.tensors))
        if last is not None and is_same and not (changed or checks or last.plan.checks):
            return last.plan
        self._written.update(changed)
        chosen = frozenset(range(len(tensors))) if checks else frozenset(self._written)
        frozen = [tensor for place in chosen & self._frozen if (tensor := tensors[place]) is not None]
        if not has_room(frozen, self._undo_nbytes):
            chosen -= self._frozen
        return SnapshotPlan(tensors, chosen, checks=checks)

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return a snapshot's tensors by name, and the names of tensors that were overwritten without a copy."""
        copies = snapshot.copies()
        held = {i: tensor for i, tensor in enumerate(snapshot.plan.tensors[: len(self.buffers)]) if tensor is not None}
        lost = {*snapshot.changed(), *(self._written & self._frozen)} - set(copies)
        return {self._names[index]: tensor for index, tensor in {**held, **copies}.items()}, [
            self._names[index] for index in sorted(lost)
        ]
