"""Record a model's state before its forward: buffers, train flags, random generators, autocast.

Only the tensors that a forward writes are copied: buffers, and parameters without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.async_flags import Flag
from nandoctor.capture.environment import Generators, RandomStates, read_autocast
from nandoctor.capture.joined import JoinOrder, can_join
from nandoctor.capture.registries import Place, as_dict, places_of
from nandoctor.capture.sharding import describe_mixed_precision, describe_shards, is_sharded, local_part
from nandoctor.capture.updates import has_room
from nandoctor.torch_compat import buffers_of, children_of, is_running_norm, parameters_of, versions_of

Tensors = tuple[torch.Tensor | None, ...]
Weights = list[torch.Tensor | None]
NUM_SAMPLED = 64
_FLAG = itemgetter("training")


class StateBefore(NamedTuple):
    """The state before the forward; `training` has the train flags in the order of the model's modules."""

    random: RandomStates
    kept: Snapshot
    keeper: StateKeeper
    children: list[tuple[nn.Module | None, ...]]
    paths: tuple[str, ...]
    training: tuple[bool, ...]
    autocast: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class WeightStamp:
    """Addresses and version counters of some weights of a model; `held` has all its weights."""

    weights: list[torch.Tensor]
    held: Weights
    places: list[int]

    @property
    def was_moved(self) -> bool:
        """True if one of the weights was written or moved; misses writes through `.data` and replaced weights."""
        return self.places != _find_places(self.weights)


class Observer:
    """A reader of a model's state before its forward, with a cache of what does not change from step to step."""

    def __init__(self, model: nn.Module, undo_nbytes: int) -> None:
        self.model, self.undo_nbytes = model, undo_nbytes
        self.sharded = any(map(is_sharded, model.parameters()))
        self._find_modules()
        self._find_tensors()
        self.device = torch.device("cpu")
        self.generators = Generators(self.device)
        self.autocast_inside: dict[str, Any] | None = None
        self._follow_device()
        self._first_shapes = self._read_shapes()
        self._stamped: list[torch.Tensor] = []

    def _find_modules(self) -> None:
        self._paths, self._modules = zip(*self.model.named_modules(), strict=True)
        self._attributes = list(map(vars, self._modules))
        self._scripted = [module for module in self._modules if isinstance(module, torch.jit.ScriptModule)]
        self._children = list(map(children_of, self._modules))
        self._known_children = self._read_children()

    def _find_tensors(self) -> None:
        self._keeper = StateKeeper(self.model, self.undo_nbytes)
        self._weights = places_of(self.model, parameters_of)
        self._places = [registry for _, registry, _ in self._weights], [name for *_, name in self._weights]
        self.held = self._read_weights()
        present = [place for place in self._weights if place[1].get(place[2]) is not None]  # a bias may be None
        self._outer = [*present[:1], *present[-1:]]
        self._first = [*present, *places_of(self.model, buffers_of)][:1]

    def _read_children(self) -> list[tuple[nn.Module | None, ...]]:
        return [tuple(children.values()) for children in filter(None, self._children)]

    def follow_modules(self) -> bool:
        """Find modules and tensors again if some modules were added, removed or moved; return True if so."""
        if self._read_children() == self._known_children:
            return False
        self._find_modules()
        self._find_tensors()
        return True

    def _follow_device(self) -> None:
        """Update the device: the model may be moved after its recorder was made."""
        for _, registry, name in self._first:
            first = registry.get(name)
            if first is not None and first.device != self.device and not first.is_meta:
                self.device, self.generators = first.device, Generators(first.device)

    def _read_shapes(self) -> dict[str, torch.Size | None]:
        return {name: None if is_lazy(p) else p.shape for name, p in self.model.named_parameters()}

    def look(self) -> StateBefore:
        """Return the current state."""
        for module in self._scripted:
            as_dict(buffers_of(module))
        self._follow_device()
        return StateBefore(
            random=self.generators.read(),
            kept=self._keeper.keep(),
            keeper=self._keeper,
            children=self._known_children,
            paths=self._paths,
            training=self._read_flags(),
            autocast=read_autocast(self.device.type),
        )

    def _read_flags(self) -> tuple[bool, ...]:
        """Return the train flags, from the modules' instance dicts: that is faster than a lookup through the class."""
        try:
            return tuple(map(_FLAG, self._attributes))
        except KeyError:  # TorchScript keeps its flags outside of Python, and a class may have a property
            return tuple(module.training for module in self._modules)

    @property
    def has_borrowed_weights(self) -> bool:
        """True while `torch.func.functional_call` has put others in place of the model's weights."""
        return any(_is_borrowed(registry.get(name)) for _, registry, name in self._outer)

    def find_trained(self) -> None:
        """Find all weights, and the first and last that require gradients: stamps are taken of these two."""
        self.held = self._read_weights()
        ends = [next(filter(_is_trained, places), None) for places in (self._weights, reversed(self._weights))]
        self._stamped = [place[1][place[2]] for place in ends if place is not None]

    def stamp(self, held: Weights) -> WeightStamp | None:
        """Return a stamp that shows later writes to the weights, except in place through `.data`."""
        if self.sharded:
            return None  # FSDP itself moves and exchanges the weights
        return WeightStamp(weights=self._stamped, held=held, places=_find_places(self._stamped))

    def _read_weights(self) -> Weights:
        return list(map(dict.get, *self._places))

    def was_replaced(self, held: Weights) -> bool:
        """Return True if other parameters have taken the places of those in `held`, or they have none any more.

        Weights lent by `functional_call` do not count.
        """
        now = self._read_weights()
        if len(now) != len(held) or all(map(is_, now, held)):
            return len(now) != len(held)
        changed = [pair for pair in zip(now, held, strict=True) if pair[0] is not pair[1]]
        return not all(any(map(_is_borrowed, pair)) for pair in changed)

    def was_written(self, stamp: WeightStamp | None) -> bool:
        """Return True if the weights were written or replaced since, as far as the stamp shows."""
        return stamp is not None and (stamp.was_moved or self.was_replaced(stamp.held))

    def find_reshaped(self) -> list[str]:
        """Return the names of parameters that were added, removed or reshaped since training began."""
        now = self._read_shapes()
        known = self._first_shapes.items()  # None for lazy parameters
        first = {name: now.get(name) if shape is None else shape for name, shape in known}
        return [name for name in {**first, **now} if first.get(name) != now.get(name)]

    def describe(self, before: StateBefore, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
        """Return a dump's entries for the state before the forward, and notes on what could not be kept.

        `weights` has copies, from before the forward, of weights that were written since.
        """
        copies, lost = before.keeper.state(before.kept)
        kept, model = {**weights, **copies}, self.model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tied = {id(tensor): kept[name] for name, tensor in named if name in kept}
        kept |= {name: tied[id(tensor)] for name, tensor in named if id(tensor) in tied}
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        state = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        contents = {
            "state_dict": {name: kept[name] if name in kept else local_part(value) for name, value in state.items()},
            "shards": describe_shards(state),
            "buffers": [name for name in before.keeper.buffers if name in state],
            "training": dict(zip(before.paths, before.training, strict=True)),
            "rng": before.random.to_plain(),
            "mixed_precision": describe_mixed_precision(model),
            "autocast": before.autocast if before.autocast["enabled"] else self.autocast_inside or before.autocast,
        }
        notes = [f"state_dict.{name}: the file has its value from after the forward, not before it" for name in lost]
        if before.children != self._read_children():
            notes.append("the modules of the step: the loop has replaced some since")
        return contents, notes


def _is_trained(place: Place) -> bool:
    """Return True for a weight that requires gradients and whose values can be read."""
    _, registry, name = place
    held = registry[name]
    if not isinstance(held, nn.Parameter) or not held.requires_grad or not can_join(held):
        return False
    return not held.is_meta and not held.is_inference()


def _find_places(weights: list[torch.Tensor]) -> list[int]:
    """Return the weights' addresses, then their version counters."""
    return [*map(torch.Tensor.data_ptr, weights), *versions_of(weights)]


def _is_borrowed(held: torch.Tensor | None) -> bool:
    """Return True for a weight that is not a Parameter, as the module's own are: it is the result of an inner loop."""
    return held is not None and not isinstance(held, nn.Parameter)


class SnapshotPlan:
    """A choice of tensors to copy before each forward: the `written`. For the others the versions are kept.

    Writes through `.data` and numpy do not raise the version, so with `checks` the values are compared: all tensors are
    copied, but only a few values of each of the `large`.
    """

    def __init__(self, tensors: Tensors, written: Set[int], *, large: Set[int], checks: bool) -> None:
        self.tensors, self.checks = tensors, checks
        held = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None and not tensor.is_meta}
        present = {i: tensor for i, tensor in held.items() if not is_lazy(tensor)}
        self.is_first = len(present) < len(held)  # lazy: filled by the forward
        # Inference tensors have no version counter, so writes to them do not show.
        uncounted = {index for index, tensor in present.items() if tensor.is_inference()} - large
        self.watched = [index for index in present if index not in written and not present[index].is_inference()]
        copied = [i for i in present if i in written or i in uncounted or (checks and i not in large)]
        self.sampled = [i for i in present if checks and i not in copied and can_join(present[i])]
        self.odd = [index for index in copied if not can_join(present[index])]
        joined = [index for index in copied if can_join(present[index])]
        self._order = JoinOrder([present[index] for index in joined])
        self._joined = [joined[place] for place in self._order.places]
        self._sources, self._watched = ([present[index] for index in group] for group in (self._joined, self.watched))

    def take(self) -> Snapshot:
        """Return a snapshot of the tensors."""
        odd = {i: tensor.detach().clone() for i in self.odd if (tensor := self.tensors[i]) is not None}
        joined = self._order.copy(self._sources)
        return Snapshot(plan=self, versions=self.versions(), joined=joined, odd=odd, sampled=self.sample())

    def versions(self) -> list[int]:
        """Return the current versions of the watched tensors."""
        return versions_of(self._watched)

    def sample(self) -> list[torch.Tensor]:
        """Return a few values of each sampled tensor."""
        return [_take_few(tensor) for index in self.sampled if (tensor := self.tensors[index]) is not None]

    def split(self, joined: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the copies by index among the tensors."""
        return dict(zip(self._joined, self._order.split(joined), strict=True))


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The state before one forward: copies of tensors that are known to be written, versions of the others.

    `differs` says for each of `compared` whether its values had changed when `compare` was called.
    """

    plan: SnapshotPlan
    versions: list[int]
    joined: list[torch.Tensor]
    odd: dict[int, torch.Tensor]
    sampled: list[torch.Tensor]
    compared: list[int] = field(default_factory=list)
    differs: Flag | None = None

    def copies(self) -> dict[int, torch.Tensor]:
        """Return the copies by index among the tensors."""
        return self.odd | self.plan.split(self.joined)

    def compare(self) -> None:
        """If the plan checks values, flag the tensors whose values have changed since, counted or not."""
        if not self.plan.checks or not self.plan.tensors:
            return
        before = {**self.copies(), **dict(zip(self.plan.sampled, self.sampled, strict=True))}
        after = {i: tensor for i in self.copies() if (tensor := self.plan.tensors[i]) is not None}
        after |= dict(zip(self.plan.sampled, self.plan.sample(), strict=True))
        self.compared = list(before)
        device = next(iter(before.values())).device if before else torch.device("cpu")
        found = [_differ(before[index], after[index]).to(device) for index in before]
        self.differs = Flag(torch.stack(found).float() if found else 0.0)

    def changed(self) -> list[int]:
        """Return the indices of the watched and compared tensors that were written since."""
        now = self.plan.versions()
        counted = []
        if now != self.versions:
            counted = [i for i, old, new in zip(self.plan.watched, self.versions, now, strict=True) if old != new]
        if self.differs is None:
            return counted
        return counted + [i for i, differs in zip(self.compared, self.differs.values(), strict=False) if differs]


def _take_few(tensor: torch.Tensor) -> torch.Tensor:
    """Copy some values, spread over the tensor, or over its first row if it is not contiguous."""
    values = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[:1].flatten()
    return values[:: max(1, values.numel() // NUM_SAMPLED)].clone()


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
        norms = {id(as_dict(buffers_of(module))) for module in model.modules() if is_running_norm(module)}
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
        last = self._last
        checks = self._num_taken & (self._num_taken - 1) == 0
        changed = [] if last is None else last.changed()
        if last is not None and last.plan.checks:  # the loop may have written since the forward
            last.compare()
            changed += last.changed()
        if (
            last is None
            or checks
            or changed
            or last.plan.checks
            or last.plan.is_first
            or not all(map(is_, tensors, last.plan.tensors))
        ):
            self._written.update(changed)
            large = self._frozen if checks and not self._has_room(tensors, self._frozen) else frozenset()
            copied = self._written
            if not self._has_room(tensors, self._written & self._frozen):
                copied = self._written - self._frozen
            return SnapshotPlan(tensors, copied, large=large, checks=checks)
        return last.plan

    def _has_room(self, tensors: Tensors, places: Set[int]) -> bool:
        return has_room([tensor for place in places if (tensor := tensors[place]) is not None], self._undo_nbytes)

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return a snapshot's tensors by name, and the names of tensors that were overwritten without a copy."""
        copies = snapshot.copies()
        held = {i: tensor for i, tensor in enumerate(snapshot.plan.tensors[: len(self.buffers)]) if tensor is not None}
        lost = {*snapshot.changed(), *(self._written & self._frozen)} - set(copies)
        return {self._names[index]: tensor for index, tensor in {**held, **copies}.items()}, [
            self._names[index] for index in sorted(lost)
        ]
