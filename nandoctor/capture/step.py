"""The record of a step in progress: what a replay would need, kept until the step is known to be finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nandoctor.capture.environment import describe_generators
from nandoctor.capture.observer import Stamp, StateBefore
from nandoctor.capture.tensors import Flag
from nandoctor.capture.updates import Update
from nandoctor.dumps.packing import Packed, pack
from nandoctor.dumps.recorded_format import RandomStates
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.tracing.tensor_stats import walk_tensors


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """A step: the batch and the calls by reference, the state before the forward, and flags that may still arrive.

    `step` counts optimizer updates, `micro_batch` the forwards that share one. `explicit`: the loop marked where the
    step begins. `random` has the generators' states before each call; `running` is the number of calls
    that have not returned. `has_lent_weights`: a call got its weights from `torch.func.functional_call`.
    `without_grad`: the calls ran under `torch.no_grad`. `inside` has the children's outputs if the step is a method
    other than forward. `scale` is the loss scale before the step; `scale_version` shows whether the scaler was updated
    since. `skip` is a fused optimizer's own flag, `skipped` what is known without it. `accumulated` is the largest
    gradient after a micro-batch without an update. `num_updates` counts the optimizer updates since. `stamp` is taken
    after the first forward; `was_rewritten`: it showed a write by the loop itself before the first update.
    """

    step: int
    micro_batch: int = 0
    epoch: int | None = None
    explicit: bool = False
    batch: Any = None
    before: StateBefore | None = None
    calls: list[Packed] = field(default_factory=list)
    random: list[RandomStates] = field(default_factory=list)
    has_lent_weights: bool = False
    without_grad: bool = False
    returned: list[Packed] = field(default_factory=list)
    inside: dict[str, Packed] = field(default_factory=dict)
    running: int = 0
    loss: torch.Tensor | None = None
    loss_place: str | None = None
    flags: list[Flag] = field(default_factory=list)
    skip: Flag | None = None
    skipped: bool = False
    accumulated: Flag | None = None
    updates: list[Update] = field(default_factory=list)
    num_updates: int = 0
    stamp: list[Stamp] | None = None
    was_rewritten: bool = False
    scale: Flag | None = None
    scale_version: int | None = None
    decided: bool = False

    @property
    def loss_nonfinite(self) -> bool:
        """True if the watched loss or output is non-finite, on this rank or another."""
        return any(max(flag.values()) > 0 for flag in self.flags)

    @property
    def nonfinite_here(self) -> bool:
        """True if the watched loss or output is non-finite on this rank."""
        return any(flag.values()[0] > 0 for flag in self.flags)

    @property
    def nonfinite_ranks(self) -> list[int]:
        """The ranks on which the watched loss or output is non-finite; empty if there is only one rank."""
        return sorted({rank for flag in self.flags for rank, value in enumerate(flag.values()[1:]) if value > 0})

    @property
    def gradients_nonfinite(self) -> bool:
        """True if the gradients were measured and are non-finite."""
        flags = [self.accumulated, *[update.gradients for update in self.updates]]
        return any(flag.nonfinite for flag in flags if flag is not None)

    @property
    def spoiled(self) -> Update | None:
        """The first update that left a weight non-finite."""
        spoiled = [update for update in self.updates if update.weights is not None and update.weights.nonfinite]
        return spoiled[0] if spoiled else None

    @property
    def reason(self) -> str:
        """What went wrong first in the step: "loss", "gradients", "update" or "skipped"; "" if nothing did."""
        if self.loss_nonfinite:
            return "loss"
        if self.gradients_nonfinite:
            return "gradients"
        if self.spoiled is not None:
            return "update"
        return "skipped" if self.was_skipped else ""

    @property
    def ready(self) -> bool:
        """True once every flag except the loss's has arrived."""
        of_updates = (flag for update in self.updates for flag in (update.gradients, update.weights))
        return all(flag is None or flag.ready for flag in (self.skip, self.accumulated, *of_updates))

    @property
    def was_skipped(self) -> bool:
        """True if the scaler skipped the step."""
        return self.skipped or (self.skip is not None and self.skip.values()[0] > 0)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of this step, None without a scaler."""
        return None if self.scale is None else self.scale.values()[0]

    @property
    def undo(self) -> Mapping[str, torch.Tensor] | None:
        """The weights from before this step's updates; None if they were not copied, or not written."""
        if not self.num_updates or not self.updates or any(update.undo is None for update in self.updates):
            return None
        return {name: tensor for update in self.updates for name, tensor in (update.undo or {}).items()}

    def outputs(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the calls and the recorded children returned."""
        for packed in (*self.returned, *self.inside.values()):
            yield from (tensor for tensor, _ in packed.tensors)

    def own_loss(self) -> torch.Tensor | None:
        """Return the scalar `loss` in the last call's output, as transformers' models return it; None without one."""
        last = self.returned[-1].tree if self.returned else None
        loss = last.get("loss") if isinstance(last, dict) else None
        return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    def find_loss(self) -> str | None:
        """Return the place of the loss in the last call's output: a scalar named `loss`, or the watched tensor."""
        if self.own_loss() is not None:
            return "loss"
        returned = self.returned[-1] if self.returned else Packed(tree=None)
        scalars = [tensor for tensor, _ in returned.tensors if tensor.numel() == 1]
        if not scalars or not is_dense(self.loss) or self.loss.numel() != 1:
            return None
        memory = self.loss.data_ptr()
        own = [tensor for tensor in scalars if is_dense(tensor) and tensor.data_ptr() == memory]
        return next((place for place, tensor in walk_tensors(returned.tree) if own and tensor is own[0]), None)

    def describe(self, function: Callable[..., Any], *, is_whole: bool) -> tuple[dict[str, Any], list[str]]:
        """Return a dump's entries for the calls of `function`, the batch and the output, and notes on what is missing.

        With `is_whole`, it is a training step and returns the loss; the output is then that and the children's outputs.
        """
        batch = pack(self.batch, "batch", kinds=True)
        names, outputs = _parameter_names(function), [packed.tree for packed in self.returned]
        place = self.find_loss() if self.loss_place is None else self.loss_place
        contents = {
            "calls": [
                {
                    "names": names,
                    **packed.tree,
                    **({"differentiable": list(packed.differentiable)} if packed.differentiable else {}),
                    **({"rng": describe_generators(states)} if states else {}),
                }
                for packed, states in zip(self.calls, (None, *self.random[1:]), strict=False)
            ],
            "rng": describe_generators(self.random[0]),
            "watched": list(self.inside),
            "batch": batch.tree,
            "output": outputs[0] if len(outputs) == 1 else outputs,
            "loss_field": place if len(outputs) == 1 else None,
        }
        if is_whole:
            inside = {name: packed.tree for name, packed in self.inside.items()}
            contents |= {"output": {"returned": self.loss, **inside}, "loss_field": "returned"}
        named = [("input", packed) for packed in self.calls] + [("output", packed) for packed in self.returned]
        named += [(f"output.{name}", packed) for name, packed in self.inside.items()]
        notes = [note for _, packed in (*named, ("batch", batch)) for note in packed.notes]
        if self.has_lent_weights:
            notes.append(
                "the weights of the step: torch.func.functional_call gave the model others than its own (record a "
                "module that holds the model, and whose forward is the step up to the loss)"
            )
        changed = "overwritten in place after the forward, so its values are not those of the step"
        return contents, [*notes, *(f"{name}: {changed}" for name, packed in named if packed.overwritten)]


def held(batch: Any) -> Any:
    """Return the batch in a new container: training code may pop labels from its own."""
    return batch.copy() if type(batch) in (dict, list) else batch


def pack_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Packed:
    """Pack the arguments of a call by reference."""
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
        packed = pack(args[0], "input.args.0")
        return Packed({"args": (packed.tree,), "kwargs": {}}, *packed[1:])
    return pack({"args": args, "kwargs": dict(kwargs)}, "input", kinds=True)


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that accept positional arguments; empty if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
