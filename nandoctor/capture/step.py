"""One step under way: what a replay of it would need, kept until it is known to be good."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite
from operator import attrgetter
from typing import Any

import torch

from nandoctor.capture.async_flags import Flag
from nandoctor.capture.environment import RandomStates
from nandoctor.capture.observer import StateBefore, WeightStamp
from nandoctor.capture.updates import Update
from nandoctor.dumps.packing import Packed, copied, pack
from nandoctor.dumps.recorded_format import MAX_CALLS
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.machine import memory_of
from nandoctor.text import join_first
from nandoctor.torch_compat import version_of
from nandoctor.tracing.tensor_tree import walk_tensors

_IS_RAISED, _IS_NONFINITE, _IS_READY = map(attrgetter, ("is_raised", "nonfinite", "ready"))
_FEW_CALLS, _MAX_NBYTES_OF_CALLS = 16, 1 << 28
"""Of a step that the loop does not mark so many calls are held, and more while they are no larger than this."""


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """A step: the batch and the calls by reference, the state before the forward, and the flags on their way.

    `step` counts the optimizer's updates, and `micro_batch` the forwards that share one. `explicit`: the loop said
    where the step begins. `between` are the generators before each call but the first.
    `borrowed` are, by call, the weights that `torch.func.functional_call` gave it, the same object for calls that were
    given the same. `without_grad`: its calls were made under `torch.no_grad`. `inside` are outputs of children, where
    the model's own call is not the step. `passed`: another model's optimizer has stepped since a forward that nobody
    watched, so that the next one begins a step of its own. `loss_value` is the loss itself, if a rule asks for it.
    `scale` is the loss scale before the step, and `scale_version` tells whether the scaler was updated since. `skip` is
    a fused optimizer's own flag, `skipped` what is known without it. `accumulated` is the largest magnitude among the
    gradients after a micro-batch that no update follows, `seen_gradient` the first of them. `num_updates` counts how
    often an optimizer has written the weights since. `stamp` is the observer's after the first forward, or the last
    update, and `weights` a copy from before it, where the loop writes them without any optimizer. `nbytes` are those of
    the calls and outputs held, and `num_dropped` forwards that nobody watched came before, too many to be held.
    `running` are the places of the calls that have not returned, `ended` those of the others.
    """

    step: int
    micro_batch: int = 0
    epoch: int | None = None
    explicit: bool = False
    batch: Any = None
    kept_batch: Packed | None = None
    before: StateBefore | None = None
    calls: list[Packed] = field(default_factory=list)
    between: list[RandomStates] = field(default_factory=list)
    borrowed: dict[int, Packed] = field(default_factory=dict)
    without_grad: bool = False
    returned: list[Packed] = field(default_factory=list)
    inside: dict[str, Packed] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    passed: bool = False
    loss: torch.Tensor | None = None
    loss_place: str | None = None
    flags: list[Flag] = field(default_factory=list)
    loss_value: Flag | None = None
    skip: Flag | None = None
    skipped: bool = False
    accumulated: Flag | None = None
    seen_gradient: tuple[int, int | None] | None = None
    updates: list[Update] = field(default_factory=list)
    num_updates: int = 0
    stamp: WeightStamp | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    scale: Flag | None = None
    scale_version: int | None = None
    nbytes: int = 0
    num_dropped: int = 0
    decided: bool = False

    @property
    def loss_nonfinite(self) -> bool:
        """True if what was watched is non-finite, here or on another rank."""
        return any(map(_IS_RAISED, self.flags))

    @property
    def nonfinite_here(self) -> bool:
        """True if it is so on this rank."""
        return any(flag.values()[0] > 0 for flag in self.flags)

    @property
    def nonfinite_ranks(self) -> list[int]:
        """The ranks on which it is so; empty where there is but one."""
        return sorted({rank for flag in self.flags for rank, value in enumerate(flag.values()[1:]) if value > 0})

    @property
    def gradients_nonfinite(self) -> bool:
        """True if the gradients were looked at and are non-finite."""
        flags = [self.accumulated, *[update.gradients for update in self.updates]]
        return any(flag.nonfinite for flag in flags if flag is not None)

    @property
    def _magnitudes(self) -> list[Flag]:
        """Those of gradients and weights that were looked at."""
        flags = [self.accumulated]
        for update in self.updates:
            flags += (update.gradients, update.weights)
        return [flag for flag in flags if flag is not None]

    @property
    def spoiled(self) -> Update | None:
        """The first update that left a weight non-finite."""
        spoiled = [update for update in self.updates if update.weights is not None and update.weights.nonfinite]
        return spoiled[0] if spoiled else None

    @property
    def is_full(self) -> bool:
        """True if no more forwards can be held. Those in train mode that nobody watches are no step, and may go on."""
        num_calls = len(self.calls)
        return num_calls >= MAX_CALLS or (num_calls >= _FEW_CALLS and self.nbytes > _MAX_NBYTES_OF_CALLS)

    def add_call(self, call: Packed) -> None:
        """Hold one more call, and count what it and the output before it hold: sequences grow from call to call."""
        if self.calls:
            outputs = self.returned[-1].tensors if self.returned else ()
            self.nbytes += memory_of(tensor for tensor, _ in (*call.tensors, *outputs))
        self.calls.append(call)

    def compare_scale(self, scale: Flag | None, version: int | None, *, num_optimizers: int) -> None:
        """Note that the scaler skipped the step if its scale is lower now.

        Where an optimizer was not called, the scaler has waited for the gradients by now.
        """
        if version != self.scale_version and scale is not None and self.scale is not None:
            was_left_out = not self.updates or len(self.updates) < num_optimizers
            if was_left_out or not scale.on_device:
                self.skipped = self.skipped or scale.values() < self.scale.values()

    def look_at_later_writes(self) -> None:
        """Measure the weights as the training loop left them, which wrote them after the update: clamped, averaged."""
        measured = [(update.trained, update.trained.weights()) for update in self.updates]
        flags = [(trained, Flag(magnitude)) for trained, magnitude in measured if magnitude is not None]
        self.updates += [Update(trained=trained, gradients=None, undo={}, weights=flag) for trained, flag in flags]

    def awaits_update(self, num_optimizers: int) -> bool:
        """True if an optimizer may yet write what it trains, after the block that marks the step."""
        return not self.without_grad and len(self.updates) < max(1, num_optimizers)

    def wants_gradients(self, first: torch.Tensor | None) -> bool:
        """True if no update tells of the gradients, and they were not looked at since the `first` was written.

        The backward pass may come after the block that marks the step.
        """
        if self.updates or self.decided or self.without_grad or self.skipped:
            return False
        seen, self.seen_gradient = self.seen_gradient, None if first is None else (id(first), version_of(first))
        return self.accumulated is None or self.seen_gradient not in (None, seen)

    @property
    def has_failed(self) -> bool:
        """True if that is known by now; waits for the loss alone."""
        return self.loss_nonfinite or (self.ready and self.gradients_nonfinite)

    @property
    def is_sound(self) -> bool:
        """True if there is nothing to tell of it, and no scaler and no rule that wants its numbers all the same."""
        if self.scale is not None or self.loss_value is not None or self.skip is not None or self.skipped:
            return False
        return self.is_known_sound or not (self.loss_nonfinite or any(map(_IS_NONFINITE, self._magnitudes)))

    @property
    def is_known_sound(self) -> bool:
        """True if all numbers are here already and none tells of a failure, as at nearly all steps on a CPU."""
        if self.skip is not None or self.skipped or self.accumulated is not None:
            return False
        for flag in self.flags:
            if flag.known != 0:
                return False
        for update in self.updates:
            for magnitude in (update.gradients, update.weights):
                if magnitude is not None and (magnitude.known is None or not isfinite(magnitude.known)):
                    return False
        return True

    @property
    def ready(self) -> bool:
        """True if no device has yet to say how the step went, the loss aside."""
        return self.is_known_sound or ((self.skip is None or self.skip.ready) and all(map(_IS_READY, self._magnitudes)))

    @property
    def was_skipped(self) -> bool:
        """True if the scaler left the step out."""
        return self.skipped or (self.skip is not None and self.skip.values()[0] > 0)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of this step, None without a scaler."""
        return None if self.scale is None else self.scale.values()[0]

    @property
    def updates_since(self) -> int:
        """How often the weights were updated between the forward and now; this step's own skip is none."""
        return self.num_updates - int(self.num_updates > 0 and self.was_skipped and not self.skipped)

    @property
    def undo(self) -> Mapping[str, torch.Tensor] | None:
        """The weights as they were before this step's own updates; None if they were not kept or not written."""
        if self.weights is not None:
            return self.weights
        if not self.num_updates or not self.updates or any(update.undo is None for update in self.updates):
            return None
        return {name: tensor for update in self.updates for name, tensor in (update.undo or {}).items()}

    @property
    def lent(self) -> Mapping[str, torch.Tensor] | None:
        """The weights that all calls were given in place of the model's own, by name; None without one set for all."""
        given = [self.borrowed.get(index) for index, packed in enumerate(self.calls) if not packed.hidden]
        first = given[0] if given else None
        if first is None or first.hidden or first.overwritten or any(packed is not first for packed in given):
            return None
        weights: Mapping[str, torch.Tensor] = first.tree
        return weights

    def lend(self, weights: dict[str, torch.Tensor]) -> None:
        """Note what the call that is about to be made is given in place of the model's own weights."""
        packed, last = pack(weights, "weights"), self.borrowed.get(len(self.calls) - 1)
        self.borrowed[len(self.calls)] = last if last is not None and _are_same(last, packed) else packed

    def leave_hidden_calls(self) -> int:
        """Forget the calls within `torch.func.vmap` where there are others, which can be replayed; return how many.

        So those that raised where another was made in their place: of half of the batch, where memory was short.
        """
        self._leave_calls({index for index in self.running if index < max(self.ended, default=0)})
        hidden = {index for index, packed in enumerate(self.calls) if packed.hidden}
        if not hidden or len(hidden) == len(self.calls) or len(self.returned) != len(self.calls):
            return 0
        self.returned = [packed for index, packed in enumerate(self.returned) if index not in hidden]
        self._leave_calls(hidden)
        return len(hidden)

    def _leave_calls(self, left: Set[int]) -> None:
        kept = [index for index in range(len(self.calls)) if index not in left]
        if not left or self.before is None:
            return
        first, *further = [(self.before.random, *self.between)[index] for index in kept]
        self.before, self.between = self.before._replace(random=first), further
        self.borrowed = {now: self.borrowed[old] for now, old in enumerate(kept) if old in self.borrowed}
        self.calls = [self.calls[index] for index in kept]
        self.running, self.ended = [], []

    def copy_tensors(self) -> None:
        """Copy all that is held by reference: the loop may write its next batch to the same memory."""
        self.kept_batch = copied(pack(self.batch, "batch", kinds=True))
        for kept in (self.calls, self.returned):
            kept[:] = map(copied, kept)
        self.inside = {name: copied(packed) for name, packed in self.inside.items()}
        copies = {id(packed): copied(packed) for packed in self.borrowed.values()}
        self.borrowed = {index: copies[id(packed)] for index, packed in self.borrowed.items()}

    def make_next(self) -> RecordedStep:
        """The next micro-batch of this step, which the loop has marked."""
        return RecordedStep(
            step=self.step,
            micro_batch=self.micro_batch + 1,
            epoch=self.epoch,
            explicit=True,
            batch=self.batch,
            scale=self.scale,
            scale_version=self.scale_version,
        )

    def forget_calls(self) -> None:
        """Begin anew with the next call: those so far are no part of the step."""
        self.before, self.passed, self.without_grad, self.nbytes = None, False, False, 0
        for kept in (self.calls, self.between, self.returned, self.running, self.ended):
            kept.clear()
        self.inside.clear()
        self.borrowed.clear()

    def outputs(self) -> Iterator[torch.Tensor]:
        """All tensors that came out."""
        for packed in (*self.returned, *self.inside.values()):
            yield from (tensor for tensor, _ in packed.tensors)

    def own_loss(self) -> torch.Tensor | None:
        """The loss in the output of the last call: a scalar of that name, as models of transformers return it."""
        last = self.returned[-1].tree if self.returned else None
        loss = last.get("loss") if isinstance(last, dict) else None
        return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    def take_loss(self, loss: torch.Tensor) -> None:
        """Note the loss that was watched, and its place, as long as the output is no copy."""
        self.loss = loss
        self.loss_place = self._find_loss()

    def _find_loss(self) -> str | None:
        """The place of the loss in the output of the last call: a scalar of its name, or what was watched itself."""
        if self.own_loss() is not None:
            return "loss"
        returned = self.returned[-1] if self.returned else Packed(tree=None)
        scalars = [tensor for tensor, _ in returned.tensors if tensor.numel() == 1]
        if not scalars or not is_dense(self.loss) or self.loss.numel() != 1:
            return None
        memory = self.loss.data_ptr()
        own = [tensor for tensor in scalars if is_dense(tensor) and tensor.data_ptr() == memory]
        return next((place for place, tensor in walk_tensors(returned.tree) if own and tensor is own[0]), None)

    def describe(self, function: Callable[..., Any], *, is_method: bool) -> tuple[dict[str, Any], list[str]]:
        """What a dump says of the calls of `function`, the batch and what came out, and what could not be kept.

        A method that makes a whole step returns the loss; its output is that, and what the children inside gave.
        """
        batch = self.kept_batch or pack(self.batch, "batch", kinds=True)
        names, outputs = _parameter_names(function), [packed.tree for packed in self.returned]
        place = self._find_loss() if self.loss_place is None else self.loss_place
        contents = {
            "calls": [
                {
                    "names": names,
                    **packed.tree,
                    **({"differentiable": list(packed.differentiable)} if packed.differentiable else {}),
                    **({"rng": states.to_plain()} if states else {}),
                }
                for packed, states in zip_longest(self.calls, (None, *self.between))
            ],
            "watched": list(self.inside),
            "batch": batch.tree,
            "output": outputs[0] if len(outputs) == 1 else outputs,
            "loss_field": place if len(outputs) == 1 else None,
        }
        if is_method:
            inside = {name: packed.tree for name, packed in self.inside.items()}
            contents |= {"output": {"returned": self.loss, **inside}, "loss_field": "returned"}
        packs = [*self.calls, *self.returned, *self.inside.values(), batch]
        notes = [note for packed in packs for note in packed.notes]
        if self.num_dropped:
            notes.append(
                f"the {self.num_dropped} forwards in train mode before its calls, as nobody had watched them: if they "
                "belong to the step, put it into `with recorder.step(batch):`"
            )
        return contents, [*notes, *self._overwritten(), *self._lent()]

    def _lent(self) -> Iterator[str]:
        """Tell of the weights that were not the model's own."""
        for index, weights in () if self.lent is not None else self.borrowed.items():
            held = weights.tree.items()
            spoiled = [name for name, tensor in held if tensor is not None and not tensor.isfinite().all()]
            how = "by an update inside the loop, or by its gradient" if index else "before the step"
            yield (
                f"weights of call {index + 1}: functional_call gave it others, and a replay takes the model's own"
                + (f"; those of {join_first(spoiled, 3)} were non-finite, made so {how}" if spoiled else "")
            )

    def _overwritten(self) -> Iterator[str]:
        named = [("input", packed) for packed in self.calls] + [("output", packed) for packed in self.returned]
        named += [(f"output.{name}", packed) for name, packed in self.inside.items()]
        for name, packed in named:
            if packed.overwritten:
                yield f"{name}: overwritten in place after the forward, so it is not what the model saw or gave"


def held(batch: Any) -> Any:
    """The batch, in a container of its own: training code takes labels out of the one that it has."""
    return batch.copy() if type(batch) in (dict, list) else batch


def pack_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Packed:
    """The arguments of a call by reference."""
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
        packed = pack(args[0], "input.args.0")
        return Packed({"args": (packed.tree,), "kwargs": {}}, *packed[1:])
    return pack({"args": args, "kwargs": dict(kwargs)}, "input", kinds=True)


def _are_same(one: Packed, other: Packed) -> bool:
    """True if they hold the very same memory by the same names."""
    places = [[(tensor.data_ptr(), tensor.shape) for tensor, _ in packed.tensors] for packed in (one, other)]
    return one.tree.keys() == other.tree.keys() and places[0] == places[1] and not one.overwritten


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that arguments may be given to by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
