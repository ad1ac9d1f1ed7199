"""Looks at a model before its forward: buffers, train flags, random generators, autocast.

Only those buffers are copied that the forward writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.environment import Generators, RandomStates, read_autocast
from nandoctor.capture.joined import JoinOrder, can_join
from nandoctor.capture.sharding import describe_mixed_precision, describe_shards, local_part
from nandoctor.torch_compat import buffers_of, is_running_norm, versions_of

Buffers = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBefore:
    """The state before the forward; `training` are the train flags in the order of the model's modules."""

    random: RandomStates
    buffers: Snapshot
    training: tuple[bool, ...]
    autocast: dict[str, Any]


class Observer:
    """Looks at a model before its forward; what does not change from step to step is found out once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._buffers = BufferKeeper(model)
        self._paths = tuple(path for path, _ in model.named_modules())
        self._modules = tuple(model.modules())
        first = next(iter([*model.parameters(), *model.buffers()]), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self._generators = Generators(self.device)
        self.autocast_inside: dict[str, Any] | None = None

    def look(self) -> StateBefore:
        """The state as it is now."""
        return StateBefore(
            random=self._generators.read(),
            buffers=self._buffers.keep(),
            training=tuple([module.training for module in self._modules]),
            autocast=read_autocast(self.device.type),
        )

    def look_between(self) -> RandomStates:
        """What a further call of the same step starts from: the loop may have drawn in between."""
        return self._generators.read()

    def note_autocast(self, state: dict[str, Any]) -> None:
        """Keep the autocast that was found within the model's call."""
        self.autocast_inside = state

    def describe(self, before: StateBefore, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
        """What a dump says of the state before the forward, and what could not be kept.

        `weights` are those that were written since, as they were.
        """
        buffers, lost = self._buffers.state(before.buffers)
        kept = {**weights, **buffers}
        state = {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        contents = {
            "state_dict": {name: kept[name] if name in kept else local_part(value) for name, value in state.items()},
            "shards": describe_shards(state),
            "buffers": [name for name in self._buffers.names if name in state],
            "training": dict(zip(self._paths, before.training, strict=True)),
            "rng": before.random.to_plain(),
            "mixed_precision": describe_mixed_precision(self.model),
            "autocast": before.autocast if before.autocast["enabled"] else self.autocast_inside or before.autocast,
        }
        return contents, [f"state_dict.{name}: as the forward left it, not as it was before" for name in lost]


class SnapshotPlan:
    """Which of these very tensors are copied before each forward; of all but the `written` the versions are kept."""

    def __init__(self, buffers: Buffers, written: Set[int], *, copies_all: bool) -> None:
        self.buffers = buffers
        self.is_first = copies_all or any(
            b is not None and is_lazy(b) for b in buffers
        )  # a lazy buffer gets its values in the forward
        there = {i: buffer for i, buffer in enumerate(buffers) if buffer is not None and not is_lazy(buffer)}
        # Inference tensors count no versions, so that nobody can tell whether one was written.
        uncounted = {index for index, buffer in there.items() if buffer.is_inference()}
        self.watched = [index for index in there if index not in written and index not in uncounted]
        copied = [index for index in there if copies_all or index in written or index in uncounted]
        self.odd = [index for index in copied if not can_join(there[index])]
        joined = [index for index in copied if can_join(there[index])]
        self._order = JoinOrder([there[index] for index in joined])
        self._joined = [joined[place] for place in self._order.places]
        self._sources, self._watched = ([there[index] for index in group] for group in (self._joined, self.watched))

    def is_for(self, buffers: Buffers) -> bool:
        """True of the same tensors."""
        return all(map(is_, buffers, self.buffers))

    def versions(self) -> list[int]:
        """The versions of the watched as they are now."""
        return versions_of(self._watched)

    def copy(self) -> list[torch.Tensor]:
        """What `split` makes copies of."""
        return self._order.copy(self._sources)

    def split(self, joined: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The copies by place among the buffers."""
        return dict(zip(self._joined, self._order.split(joined), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The buffers before one forward: copies of those known to be written, of the others the versions."""

    plan: SnapshotPlan
    versions: list[int]
    joined: list[torch.Tensor]
    odd: dict[int, torch.Tensor]

    def changed(self) -> list[int]:
        """Which of those that are watched were written to in place since."""
        now = self.plan.versions()
        return [index for index, old, new in zip(self.plan.watched, self.versions, now, strict=True) if old != new]


class BufferKeeper:
    """Knows which buffers of a model a forward writes: the running statistics of norms, and whatever it saw change.

    The first snapshot copies all buffers, since nothing was seen yet.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(path, module, name) for path, module in model.named_modules() for name in buffers_of(module)]
        self.names = tuple(f"{path}.{name}" if path else name for path, _, name in places)
        self._registries = [buffers_of(module) for _, module, _ in places]
        self._own_names = [name for *_, name in places]
        self._written = {i for i, (_, module, _) in enumerate(places) if is_running_norm(module)}
        self._last: Snapshot | None = None

    def keep(self) -> Snapshot:
        """The buffers as they are now."""
        if not self.names and self._last is not None:
            return self._last
        buffers: Buffers = tuple(map(dict.get, self._registries, self._own_names))
        plan = self._plan_for(buffers)
        odd = {index: buffer.clone() for index in plan.odd if (buffer := buffers[index]) is not None}
        self._last = Snapshot(plan=plan, versions=plan.versions(), joined=plan.copy(), odd=odd)
        return self._last

    def _plan_for(self, buffers: Buffers) -> SnapshotPlan:
        """What to copy, by all that was seen to be written since the last snapshot."""
        last = self._last
        if last is None:
            return SnapshotPlan(buffers, self._written, copies_all=True)
        changed = last.changed()
        self._written.update(changed)
        if changed or last.plan.is_first or not last.plan.is_for(buffers):
            return SnapshotPlan(buffers, self._written, copies_all=False)
        return last.plan

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The buffers of a snapshot by name, and the names of those that were overwritten and not copied."""
        copies = snapshot.odd | snapshot.plan.split(snapshot.joined)
        held = {index: buffer for index, buffer in enumerate(snapshot.plan.buffers) if buffer is not None}
        lost = [self.names[index] for index in snapshot.changed() if index not in copies]
        return {self.names[index]: buffer for index, buffer in {**held, **copies}.items()}, lost
