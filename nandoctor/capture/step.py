"""The record of a step in progress and of the state before it, kept until the step is known to be finite."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.environment import Generators, describe_generators, read_autocast
from nandoctor.capture.tensors import (
    Flag,
    JoinOrder,
    can_join,
    describe_mixed_precision,
    describe_shard,
    is_sharded,
    local_part,
)
from nandoctor.capture.updates import Update, has_room
from nandoctor.dumps.packing import Packed, pack
from nandoctor.dumps.recorded_format import RandomStates
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.text import dtype_name
from nandoctor.torch_compat import buffers_of, parameters_of, version_of
from nandoctor.tracing.tensor_stats import walk_tensors

RAISED = Flag(math.inf)
"""The flag of a step that raised an error for a non-finite value."""


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """A step: the batch and the calls by reference, the state before the forward, and flags that may still arrive.

    `step` counts optimizer updates, and the times that gradients were set to None without one; `micro_batch` counts the
    forwards in between. `explicit`: the loop marked where the step begins. `random` has the generators' states before
    each call; `running` is the number of calls that have not returned. `has_lent_weights`: a call got its weights from
    `torch.func.functional_call`. `without_grad`: the calls ran under `torch.no_grad`. `inside` has the children's
    outputs if the step is a method other than forward. `scale` is the loss scale before the step; `scale_version` shows
    whether the scaler was updated since. `skip` is a fused optimizer's own flag, `skipped` what is known without it.
    `accumulated` is the largest gradient after a micro-batch without an update. `num_updates` counts the optimizer
    updates since. `stamp` is taken after the first forward, if the weights are the model's own and stay where they
    are; `was_rewritten`: it showed a write by the loop itself before the first update.
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
        return any(flag.nonfinite for flag in self.flags)

    @property
    def nonfinite_here(self) -> bool:
        """True if the watched loss or output is non-finite on this rank."""
        return not all(math.isfinite(flag.values()[0]) for flag in self.flags)

    @property
    def nonfinite_ranks(self) -> list[int]:
        """The ranks on which the watched loss or output is non-finite; empty if there is only one rank."""
        values = [item for flag in self.flags for item in enumerate(flag.values()[1:])]
        return sorted({rank for rank, value in values if not math.isfinite(value)})

    @property
    def awaits_gradients(self) -> bool:
        """True if its gradients count and no update has measured them."""
        return not (self.updates or self.decided or self.without_grad or self.skipped)

    @property
    def gradients_nonfinite(self) -> bool:
        """True if the gradients were measured and are non-finite."""
        flags = [self.accumulated, *[update.gradients for update in self.updates]]
        return any(flag.nonfinite for flag in flags if flag is not None)

    @property
    def spoiled(self) -> Update | None:
        """The first update that left a weight non-finite."""
        spoiling = (update for update in self.updates if update.weights is not None and update.weights.nonfinite)
        return next(spoiling, None)

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

    def outputs(self) -> list[torch.Tensor]:
        """Return all tensors that the calls and the recorded children returned."""
        return [tensor for packed in (*self.returned, *self.inside.values()) for tensor, _ in packed.tensors]

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
            "loss_field": self.find_loss() if len(outputs) == 1 else None,
        }
        if is_whole:
            inside = {name: packed.tree for name, packed in self.inside.items()}
            contents |= {"output": {"returned": self.loss, **inside}, "loss_field": "returned"}
        places = ["output"] if len(outputs) == 1 else [f"output.{index}" for index in range(len(outputs))]
        made = dict(zip(places, self.returned, strict=True)) | {
            f"output.{name}": packed for name, packed in self.inside.items()
        }
        contents["overwritten"] = [name for place, packed in made.items() for name in packed.list_overwritten(place)]
        notes = [note for packed in (*self.calls, *made.values(), batch) for note in packed.notes]
        if self.has_lent_weights:
            notes.append(
                "the weights of the step: torch.func.functional_call gave the model others than its own (record a "
                "module that holds the model, and whose forward is the step up to the loss)"
            )
        changed = "overwritten in place after the forward, so its values are not those of the step"
        written = ["input" for packed in self.calls if packed.overwritten] + contents["overwritten"]
        return contents, [*notes, *(f"{name}: {changed}" for name in written)]


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


_IS_TRAINING = attrgetter("training")


class StateBefore(NamedTuple):
    """The state before the forward; `training` has the train flags in the order of the model's modules."""

    kept: _Snapshot
    training: tuple[bool, ...]
    autocast: dict[str, Any]
    default_dtype: torch.dtype


class Observer:
    """A reader of a model's state before its forward, with a cache of what does not change from step to step."""

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        self.model, self.undo_nbytes = model, undo_nbytes
        self._built_dtype = dtype_name(torch.get_default_dtype())
        self.sharded = any(map(is_sharded, model.parameters()))
        self._paths, self._modules = zip(*model.named_modules(), strict=True)
        buffers = _places_of(model, buffers_of)
        held = [(place, place[1][place[2]]) for place in _places_of(model, parameters_of)]
        weights = [(place, weight) for place, weight in held if weight is not None]
        trained = [place for place, weight in weights if weight.requires_grad and can_join(weight)]
        self._first = [*(place for place, _ in weights), *buffers][:1]
        self._ends = [*trained[:1], *trained[-1:]]
        # The forward may write buffers and frozen weights (running statistics, a queue, a momentum encoder), and so may
        # the loop before the step is decided.
        kept = [*buffers, *(place for place, weight in weights if not weight.requires_grad)]
        self._kept_names = [path for path, *_ in kept]
        self._kept_places = [registry for _, registry, _ in kept], [name for *_, name in kept]
        self._num_buffers = len(buffers)
        self._plan: _SnapshotPlan | None = None
        self.device, self.generators = self._find_device(), Generators()
        self.autocast_inside: dict[str, Any] | None = None

    def _find_device(self) -> torch.device:
        first = next((registry.get(name) for _, registry, name in self._first), None)
        return torch.device("cpu") if first is None or first.is_meta else first.device

    def look(self) -> StateBefore:
        """Return the current state."""
        self.device = self._find_device()  # the model may be moved after its recorder was made
        tensors: Tensors = tuple(map(dict.get, *self._kept_places))
        if self._plan is None or not (self._plan.is_final and all(map(is_, tensors, self._plan.tensors))):
            self._plan = _SnapshotPlan(self._kept_names, tensors, self._num_buffers, self.undo_nbytes)
        return StateBefore(
            kept=self._plan.take(),
            training=tuple(map(_IS_TRAINING, self._modules)),
            autocast=read_autocast(self.device.type),
            default_dtype=torch.get_default_dtype(),
        )

    @property
    def has_lent_weights(self) -> bool:
        """True while `torch.func.functional_call` has put other tensors in place of the model's parameters."""
        return any(not isinstance(registry.get(name), nn.Parameter) for _, registry, name in self._ends)

    def stamp(self) -> list[Stamp]:
        """Return the stamps of the first and the last trained weight."""
        held = [registry.get(name) for _, registry, name in self._ends]
        return _stamps_of([weight for weight in held if weight is not None])

    def was_written(self, stamp: list[Stamp] | None) -> bool:
        """Return True if the weights were written since, as far as the stamp shows."""
        return stamp is not None and stamp != self.stamp()

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
            "default_dtype": dtype_name(before.default_dtype),
            "built_dtype": self._built_dtype,
        }
        if not is_same:
            return contents, ["the modules of the step: some were added or taken out after the recorder was made"]
        lost += [name for name in buffers if name not in kept]  # those of TorchScript
        changed = "the file has its value from after the forward, not before it"
        return contents, [f"state_dict.{name}: {changed}" for name in lost]


_SMALL_NBYTES = 1 << 20
"""The largest buffer that is copied however little room there is: running statistics have some kilobytes."""

_Place = tuple[str, dict[str, Any], str]
"""A tensor's path in the model, its module's registry, and its name there."""

Tensors = tuple[torch.Tensor | None, ...]
State = tuple[dict[str, torch.Tensor], list[str]]
_Snapshot = Callable[[], State]
"""Returns tensors by name as they were before a forward, and the names of those overwritten without a copy."""
Stamp = tuple[int | None, int]


def _stamps_of(tensors: Sequence[torch.Tensor]) -> list[Stamp]:
    """Return what a write changes, except in place through `.data` and numpy: each one's version and memory."""
    return [(version_of(tensor), tensor.data_ptr()) for tensor in tensors]


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
        self._watched = {name: tensor for name, tensor in present.items() if name not in self._copied}

    def take(self) -> _Snapshot:
        """Return a snapshot of the tensors."""
        return partial(self._state, _stamps_of([*self._watched.values()]), self._order.copy([*self._copied.values()]))

    def _state(self, stamps: Sequence[Stamp], joined: Sequence[torch.Tensor]) -> State:
        copies = dict(zip(self._copied, self._order.split(joined), strict=True))
        stamped = zip(self._watched, stamps, _stamps_of([*self._watched.values()]), strict=True)
        return self._buffers | copies, [name for name, before, now in stamped if before != now]
