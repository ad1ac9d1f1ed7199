"""Looks at a model before its forward: buffers, train flags, random generators, autocast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nandoctor.capture.buffers import BufferKeeper, Snapshot
from nandoctor.capture.environment import RandomStates, keep_random_states, read_autocast
from nandoctor.capture.sharding import describe_mixed_precision, describe_shards, local_part


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
