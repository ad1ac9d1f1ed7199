"""One step under way: what a replay of it would need, kept until it is known to be good.

In: what the hooks see. Out: `Moment`, and what a dump says of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from nandoctor.capture.async_flags import Flag
from nandoctor.capture.buffers import BufferKeeper, Snapshot
from nandoctor.capture.environment import RandomStates, keep_random_states, read_autocast
from nandoctor.dumps.trees import Packed, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The state before the forward; `training` are the train flags in the order of the model's modules."""

    random: RandomStates
    buffers: Snapshot
    training: tuple[bool, ...]
    autocast: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Moment:
    """A step: the batch and the calls by reference, the state before the forward, and the flags on their way.

    `explicit`: the loop said where the step begins. `between` are the generators before each call but the first.
    `inside` are outputs of children, where the model's own call is not the step. `passed`: another model's optimizer
    has stepped since a forward that nobody watched, so that the next one begins a step of its own. `scale` is the loss
    scale before the step, and `scale_version` tells whether the scaler was updated since. `skip` is a fused optimizer's
    own flag, `skipped` what is known without it. `num_updates` counts how often the weights were written since.
    """

    step: int
    epoch: int | None = None
    explicit: bool = False
    batch: Any = None
    before: Before | None = None
    calls: list[Packed] = field(default_factory=list)
    between: list[RandomStates] = field(default_factory=list)
    returned: list[Packed] = field(default_factory=list)
    inside: dict[str, Packed] = field(default_factory=dict)
    num_running: int = 0
    passed: bool = False
    loss: torch.Tensor | None = None
    flags: list[Flag] = field(default_factory=list)
    skip: Flag | None = None
    skipped: bool = False
    stepped: bool = False
    num_updates: int = 0
    scale: torch.Tensor | None = None
    scale_version: int | None = None
    judged: bool = False

    @property
    def loss_bad(self) -> bool:
        """Whether what was watched is non-finite, here or on another rank."""
        return any(flag.values()[-1] > 0 for flag in self.flags)

    @property
    def bad_here(self) -> bool:
        """Whether it is so on this rank."""
        return any(flag.values()[0] > 0 for flag in self.flags)

    @property
    def waits_for_skip(self) -> bool:
        """Whether a device has yet to say if the step was skipped."""
        return self.skip is not None and self.skip.on_device

    @property
    def was_skipped(self) -> bool:
        """Whether the scaler left the step out."""
        return self.skipped or (self.skip is not None and self.skip.values()[0] > 0)

    @property
    def updates_since(self) -> int:
        """How often the weights were updated between the forward and now; this step's own skip is none."""
        return self.num_updates - int(self.num_updates > 0 and self.was_skipped and not self.skipped)

    def outputs(self) -> Iterator[torch.Tensor]:
        """All tensors that came out."""
        for packed in (*self.returned, *self.inside.values()):
            yield from (tensor for tensor, _ in packed.tensors)

    def own_loss(self) -> torch.Tensor | None:
        """The loss in the output of the last call: a scalar of that name, as models of transformers return it."""
        last = self.returned[-1].tree if self.returned else None
        loss = last.get("loss") if isinstance(last, dict) else None
        return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    def describe(self, function: Callable[..., Any], *, is_method: bool) -> tuple[dict[str, Any], list[str]]:
        """What a dump says of the calls of `function`, the batch and what came out, and what could not be kept.

        A method that makes a whole step returns the loss; its output is that, and what the children inside gave.
        """
        batch = pack(self.batch, "batch")
        names = _parameter_names(function)
        contents = {
            "calls": [
                {"names": names, **packed.tree, **({"rng": states.to_plain()} if states else {})}
                for packed, states in zip_longest(self.calls, (None, *self.between))
            ],
            "watched": list(self.inside),
            "batch": batch.tree,
            "output": self._output_of_method() if is_method else self._output(),
            "loss_field": "returned" if is_method else self._loss_field(),
        }
        packs = [*self.calls, *self.returned, *self.inside.values(), batch]
        return contents, [note for packed in packs for note in packed.notes] + list(self._overwritten())

    def _output(self) -> Any:
        return self.returned[0].tree if len(self.returned) == 1 else [packed.tree for packed in self.returned]

    def _output_of_method(self) -> dict[str, Any]:
        return {"returned": self.loss, **{name: packed.tree for name, packed in self.inside.items()}}

    def _loss_field(self) -> str | None:
        return "loss" if len(self.returned) == 1 and self.own_loss() is not None else None

    def _overwritten(self) -> Iterator[str]:
        named = [("input", packed) for packed in self.calls] + [("output", packed) for packed in self.returned]
        named += [(f"output.{name}", packed) for name, packed in self.inside.items()]
        for name, packed in named:
            if packed.overwritten:
                yield f"{name}: overwritten in place after the forward, so it is not what the model saw or gave"


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

    def look(self) -> Before:
        """The state as it is now."""
        return Before(
            random=keep_random_states(self.device),
            buffers=self._buffers.keep(),
            training=tuple([module.training for module in self._modules]),
            autocast=read_autocast(self.device.type),
        )

    def look_between(self) -> RandomStates:
        """What a further call of the same step starts from: the loop may have drawn in between."""
        return keep_random_states(self.device)

    def learn(self, before: Before) -> None:
        """See which buffers the forward wrote."""
        self._buffers.learn(before.buffers)

    def note_autocast(self, state: dict[str, Any]) -> None:
        """Keep the autocast that was found within the model's call."""
        self.autocast_inside = state

    def describe(self, before: Before) -> tuple[dict[str, Any], list[str]]:
        """What a dump says of the state before the forward, and what could not be kept."""
        buffers, lost = self._buffers.state(before.buffers)
        state = {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        contents = {
            "state_dict": {name: buffers.get(name, value) for name, value in state.items()},
            "buffers": [name for name in self._buffers.names if name in state],
            "training": dict(zip(self._paths, before.training, strict=True)),
            "rng": before.random.to_plain(),
            "autocast": before.autocast if before.autocast["enabled"] else self.autocast_inside or before.autocast,
        }
        return contents, [f"state_dict.{name}: as the forward left it, not as it was before" for name in lost]


def pack_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Packed:
    """The arguments of a call by reference."""
    return pack({"args": args, "kwargs": dict(kwargs)}, "input")


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that arguments may be given to by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
