"""A step that also returns other tensors in which a NaN can hide, so that they are examined like its output.

These are what the forward leaves in the model's weights, attributes and containers, and the arguments of ops that
returned integers, booleans or only finite numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nandoctor.engine.call import Batch
from nandoctor.engine.module_state import tensors_in
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.trace import SourceLine
from nandoctor.ops import COMPARISONS, MOVES, SELECTIONS, UNFILLED
from nandoctor.torch_compat import plain_torch, tree_tensors, version_of
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines, intercepting
from nandoctor.tracing.tensor_stats import all_finite, format_of, numbers_in

_PASS_THROUGH = MOVES | SELECTIONS | UNFILLED


class Exposed(NamedTuple):
    """The model's output; by name, the tensors that it left behind, and op arguments whose NaN or Inf was hidden."""

    output: Any
    kept: dict[str, torch.Tensor]
    taken: dict[str, torch.Tensor]


class Taken(NamedTuple):
    """An argument of an op, and the line of the op; `asked` if the op only asks for infinities in it, as `x == inf`."""

    op: str
    argument: str
    source: SourceLine | None
    asked: bool = False


@dataclass(slots=True, kw_only=True)
class Exposing:
    """Makes `step` return an `Exposed`.

    With `only`, that holds the tensors at these paths, whatever their values; else all that changed, and all op
    arguments whose non-finite values the op hid. `sites` describes the latter by their paths in the output. The op
    argument named `replaced` is given finite numbers first, by the `way` that `_replace` describes.
    """

    step: FailingStep
    only: frozenset[str] | None = None
    replaced: str = ""
    way: int = 0
    sites: dict[str, Taken] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _taken: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def exposed(self) -> FailingStep:
        """The step with the exposed tensors in its output, and none of them in its loss."""
        call = replace(self.step.call, forward=self._forward)
        return replace(self.step, call=call, loss=None if self.step.loss is None else self._loss)

    def _forward(self, batch: Batch) -> Exposed:
        self._counts, self._taken = Counter(), {}
        before = {path: (tensor, version_of(tensor)) for path, tensor in _list_state(self.step.model)}
        with intercepting(self._look):
            output = self.step.call.forward(batch)
        kept = {
            path: tensor
            for path, tensor in _list_state(self.step.model)
            if self._shows(f"kept.{path}", _is_new, tensor, *before.get(path, (None, 0)))
        }
        with plain_torch():
            for path, held in (*self.step.model.named_parameters(), *self.step.model.named_buffers()):
                if self._shows(f"kept.{path}", lambda kept: not all_finite(kept), held):
                    kept[path] = held
        return Exposed(output, kept, self._taken)

    def _shows(self, path: str, could_hide: Callable[..., bool], *given: Any) -> bool:
        """Return True if a place is exposed: one of `only`, or without that, any where something could hide."""
        return path in self.only if self.only is not None else could_hide(*given)

    def _loss(self, made: Exposed, batch: Batch) -> torch.Tensor:
        assert self.step.loss is not None
        with intercepting(self._look):
            return self.step.loss(made.output, batch)

    def _look(self, call: Invocation, proceed: Proceed) -> Any:
        number = self._counts[call.name]
        self._counts[call.name] += 1
        names = {f"{call.name}_{number}_{argument}": (argument, tensor) for argument, tensor in call.tensors()}
        if self.replaced in names:
            argument, tensor = names[self.replaced]
            return proceed(call.with_argument(argument, _replace(tensor, self.way)))
        made = proceed(call)
        for name, (argument, tensor) in names.items() if call.name not in _PASS_THROUGH else ():
            if self._shows(f"taken.{name}", _hides, call, tensor, made):
                self._taken[name] = tensor
                asked = _asks_for_infinity(call, tensor)
                self.sites[f"taken.{name}"] = Taken(call.name, argument, find_lines().source, asked)
        return made


def continued(
    step: FailingStep, places: Collection[str], *, training: bool, way: int | None = None, taken: set[str]
) -> FailingStep:
    """The step after itself: the output is that of a second forward, in eval mode without `training`.

    Those of the `places`, buffers and attributes, are added to `taken` that an op of the second forward takes, or that
    the first did not leave. With a `way`, finite numbers first take the place of what is NaN or Inf in them.
    """

    def forward(batch: Batch) -> Any:
        step.call.forward(batch)
        state = dict((*step.model.named_buffers(), *_list_state(step.model)))
        held = {id(state[place]): place for place in places if place in state}
        taken.update(set(places) - state.keys())
        if way is not None:
            for place in held.values():
                state[place].data = _replace(state[place].detach(), way)

        def look(call: Invocation, proceed: Proceed) -> Any:
            taken.update(held[id(tensor)] for _, tensor in call.tensors() if id(tensor) in held)
            return proceed(call)

        if not training:
            step.model.eval()
        with intercepting(look):
            return step.call.forward(batch)

    return replace(step, call=replace(step.call, forward=forward))


def _hides(call: Invocation, taken: torch.Tensor, made: Any) -> bool:
    """Return True if the op made integers or booleans from a non-finite argument, or finite numbers from a NaN."""
    leaves = tree_tensors(made)
    floats = [leaf for leaf in leaves if format_of(leaf.dtype) is not None]
    numbers = numbers_in(taken)
    if numbers is None or all_finite(taken):
        return False
    # `x != x` tests for NaN, and hides nothing.
    if len(floats) < len(leaves) or not leaves:
        return not (call.name in ("eq", "ne") and call.args[0] is call.args[1])
    return all(map(all_finite, floats)) and bool(torch.isnan(numbers).any())


def _asks_for_infinity(call: Invocation, taken: torch.Tensor) -> bool:
    """Return True for a comparison with the number Inf, unless a NaN is compared too."""
    other = call.args[1] if len(call.args) > 1 else None
    is_infinite = call.name in COMPARISONS and isinstance(other, float) and math.isinf(other)
    return is_infinite and not bool(taken.isnan().any())


WAYS = 4


def _replace(tensor: torch.Tensor, way: int) -> torch.Tensor:
    """Return the tensor with numbers that fp16 holds: any for NaN, large ones for infinities.

    No two non-finite elements get the same number, and each `way` gives the largest to another, so that the result
    changes if their order matters. In way 2 all NaN are large; in way 3 they are all 0 instead, which counts and
    booleans tell from any other number.
    """
    steps = torch.linspace(0, 1, tensor.numel(), device=tensor.device)
    steps = (steps.flip(0) if way == 1 else steps).view(tensor.shape)
    large, any_number = (3e4 + 3e4 * steps).to(tensor.dtype), (1.2e5 * steps - 6e4).to(tensor.dtype)
    finite = torch.where(torch.isinf(tensor), large.copysign(tensor), tensor)
    return torch.where(torch.isnan(tensor), {2: large, 3: torch.zeros_like(large)}.get(way, any_number), finite)


def _is_new(tensor: torch.Tensor, before: torch.Tensor | None, version: int | None) -> bool:
    """Return True if the tensor is another one than before the forward, or was written to since."""
    if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
        return True
    is_same = before is tensor and version == version_of(tensor)
    return not is_same and (before is tensor or not torch.allclose(before, tensor, 0, 0, equal_nan=True))


def _list_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors that the model holds besides weights and buffers, each once, by place."""
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with plain_torch():
        for place, tensor in tensors_in(model, attributes=True):
            if id(tensor) not in seen and format_of(tensor.dtype) is not None:
                seen.add(id(tensor))
                yield place, tensor
