"""Looks at a model before its forward: buffers, train flags, random generators, autocast.

Only those buffers are copied that the forward writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nandoctor.capture.environment import RandomStates, keep_random_states, read_autocast
from nandoctor.capture.sharding import describe_mixed_precision, describe_shards, local_part
from nandoctor.torch_compat import buffers_of, copy_tensors, is_running_norm, version_of


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
        self.autocast_inside: dict[str, Any] | None = None

    def look(self) -> StateBefore:
        """The state as it is now."""
        return StateBefore(
            random=keep_random_states(self.device),
            buffers=self._buffers.keep(),
            training=tuple([module.training for module in self._modules]),
            autocast=read_autocast(self.device.type),
        )

    def look_between(self) -> RandomStates:
        """What a further call of the same step starts from: the loop may have drawn in between."""
        return keep_random_states(self.device)

    def learn(self, before: StateBefore) -> None:
        """See which buffers the forward wrote."""
        self._buffers.learn(before.buffers)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The buffers before one forward: each itself with its version, and copies of those known to be written."""

    buffers: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]
    copies: dict[int, torch.Tensor]

    def changed(self) -> list[int]:
        """Which buffers were written to in place since."""
        now = tuple([None if buffer is None else version_of(buffer) for buffer in self.buffers])
        return [i for i, version in enumerate(now) if version != self.versions[i]] if now != self.versions else []


class BufferKeeper:
    """Knows which buffers of a model a forward writes: the running statistics of norms, and whatever it saw change.

    The first snapshot copies all buffers, since nothing was seen yet.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(path, module, name) for path, module in model.named_modules() for name in buffers_of(module)]
        self.names = tuple(f"{path}.{name}" if path else name for path, _, name in places)
        self._places = [(buffers_of(module), name) for _, module, name in places]
        self._written = {i for i, (_, module, _) in enumerate(places) if is_running_norm(module)}
        self._unseen = True

    def keep(self) -> Snapshot:
        """The buffers as they are now."""
        buffers = tuple([registry.get(name) for registry, name in self._places])
        versions = tuple([None if buffer is None else version_of(buffer) for buffer in buffers])
        # Inference tensors count no versions, so that nobody can tell whether one was written.
        uncounted = [index for index, version in enumerate(versions) if version is None]
        wanted = range(len(buffers)) if self._unseen else sorted({*self._written, *uncounted})
        sources = {index: buffer for index in wanted if (buffer := buffers[index]) is not None}
        copies = [torch.empty_like(buffer) for buffer in sources.values()]
        if copies:
            with torch.no_grad():
                copy_tensors(copies, list(sources.values()))
        self._unseen = False
        return Snapshot(buffers=buffers, versions=versions, copies=dict(zip(sources, copies, strict=True)))

    def learn(self, snapshot: Snapshot) -> None:
        """See what the forward after this snapshot wrote."""
        self._written.update(snapshot.changed())

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The buffers of a snapshot by name, and the names of those that were overwritten and not copied."""
        state = {name: buffer for name, buffer in zip(self.names, snapshot.buffers, strict=True) if buffer is not None}
        state |= {self.names[index]: copy for index, copy in snapshot.copies.items()}
        lost = [self.names[index] for index in snapshot.changed() if index not in snapshot.copies]
        return state, lost
