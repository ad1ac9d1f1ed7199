"""Batches close to the failing one, and the step after it: what a fix has to pass besides the step itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.dumps.tensors import comparable_values
from nandoctor.engine.call import Batch, Call
from nandoctor.engine.reproduction import is_flags
from nandoctor.engine.runner import FailingStep
from nandoctor.fixes.verify import Trials
from nandoctor.source_files import parse_source
from nandoctor.torch_compat import is_running_norm

_NOISE = 1e-3
"""A share of each value: less than the next batch differs by, more than fp16's rounding."""


def _in_another_order(call: Call) -> Call | None:
    size = call.sample_count
    return None if size is None else call.on_samples([size - 1, *range(size - 1)])


def _with_noise(value: torch.Tensor) -> torch.Tensor:
    """Change every value by a share of itself, so that the zeros of a mask stay zeros."""
    return value * (1 + _NOISE * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value))


def scaled(call: Call, names: frozenset[str], factor: float) -> Call | None:
    """Multiply the named arrays' real numbers by a factor, but not flags of 0 and 1; None if there is nothing else."""
    given = {name: call.batch[name] for name in names & call.batch.keys()}
    measured = frozenset(name for name, value in given.items() if is_dense(value) and not is_flags(value))
    return _changed(call, measured, lambda value: value * factor)


def _changed(call: Call, names: frozenset[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Call | None:
    """Return the call with the named arrays of real numbers changed; None if there are none."""
    dense = {name: value for name, value in call.batch.items() if name in names and is_dense(value)}
    numbers = {name: value for name, value in dense.items() if value.is_floating_point()}
    changed = {name: change(comparable_values(value)).to(value.dtype) for name, value in numbers.items()}
    return replace(call, batch={**call.batch, **changed}) if changed else None


VARIATIONS: Mapping[str, Callable[[Call, frozenset[str]], Call | None]] = {
    "samples in another order": lambda call, _: _in_another_order(call),
    "small noise on the inputs": lambda call, _: _changed(call, call.used, _with_noise),
    "inputs halved": lambda call, sizes: scaled(call, sizes, 0.5),
    "inputs doubled": lambda call, sizes: scaled(call, sizes, 2.0),
}
"""By name, functions that return a call for which a fix has to work as well, or None if this one has no such one; they
are given the names of the arrays that may be scaled."""
OTHER_SEED = "other seed"
NEARLY_THE_SAME = ("samples in another order", "small noise on the inputs", OTHER_SEED)
"""Those that hardly change the values; they are combined in one run, and with each of the others."""


def with_step_before(
    step: FailingStep, left: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> FailingStep | None:
    """Return the step run after one on inputs a little off its own; None if it would begin with the same state.

    `left` is the state after the step, `before` that it begins with. What norms write is not read in train mode.
    """
    norms = [module for module in step.model.modules() if is_running_norm(module)]
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    unread = {"random numbers", *(name for name, buffer in step.model.named_buffers() if id(buffer) in statistics)}
    after = {name: value for name, value in left.items() if name not in unread}
    if not after:
        return None
    same = [name for name in after.keys() & before if after[name].dtype is before[name].dtype]
    if all(after[name].equal(before[name]) for name in same) and len(same) == len(after):
        return None

    def forward(batch: Batch) -> Any:
        # Not the same numbers: a model that remembers them may be singular at what it has seen.
        numbers = {name for name, value in batch.items() if is_dense(value) and value.is_floating_point()}
        first = {name: _with_noise(value) if name in numbers else value.clone() for name, value in batch.items()}
        output = step.call.forward(first)
        if step.loss is not None:
            step.loss(output, first)  # it may leave state as well
        return step.call.forward(batch)

    return replace(step, call=replace(step.call, forward=forward))


def extreme_samples(samples: Sequence[int], call: Call) -> tuple[int, ...]:
    """Return which of `samples` has the largest magnitude in its inputs, then which has the smallest."""
    size = call.batch_size or 0
    arrays = [array for array in call.taken.values() if is_dense(array) and array.dim() and len(array) == size]
    largest = torch.zeros(size, dtype=torch.float64)
    for array in arrays:
        if array.is_floating_point() and array.numel():
            magnitudes = array.detach().double().nan_to_num().abs().reshape(size, -1).amax(1).cpu()
            largest = torch.maximum(largest, magnitudes)
    ordered = sorted(samples, key=lambda sample: -float(largest[sample]))
    return tuple(dict.fromkeys((*ordered[:1], *ordered[-1:])))


def _reads_mode(file: Path) -> bool:
    """Return True if the code of a file reads a module's `training`; what torch's modules do with it does not count."""
    tree = parse_source(file)
    return tree is not None and any(isinstance(it, ast.Attribute) and it.attr == "training" for it in ast.walk(tree))


@dataclass(eq=False, kw_only=True)
class OtherBatches:
    """The trials of a step on batches like its own, each built once.

    `guilty` are the samples to blame, `healthy` the others; both are () if they are not known. `random`: random numbers
    are drawn.
    """

    trials: Trials
    guilty: tuple[int, ...]
    healthy: tuple[int, ...]
    random: bool

    def of_samples(self, samples: tuple[int, ...]) -> Trials:
        """Return the trials of the step with these samples alone."""
        step = self.trials.step
        return self.trials.on(replace(step, call=step.call.on_samples(samples)))

    @cached_property
    def guilty_alone(self) -> Trials | None:
        """The trials of the samples to blame; None if no other sample is known."""
        return self.of_samples(self.guilty) if self.healthy else None

    @cached_property
    def in_other_mode(self) -> Trials | None:
        """The trials of the step in eval mode, or in train mode; None if the user's code never asks for the mode.

        They have no loss: that of a training need not take what a model returns in eval mode.
        """
        step = self.trials.step
        if not any(map(_reads_mode, step.project.files(step.model))):
            return None
        varied = self.trials.varied(training=not step.mode.training, seed=step.randomness.seed)
        return replace(varied, step=replace(varied.step, loss=None))

    @cached_property
    def few(self) -> tuple[int, ...] | None:
        """Two of the samples to blame and one other, if these are at most half of the batch; else None.

        They are those with the largest values, and of those to blame also the one with the smallest.
        """
        call = self.trials.step.call
        guilty = extreme_samples(self.guilty, call)
        few = sorted((*guilty, *extreme_samples(self.healthy, call)[:1]))
        return tuple(few) if guilty and 2 * len(few) <= (call.batch_size or 0) else None

    @cached_property
    def variations(self) -> Mapping[str, Trials | None]:
        """The trials of the step's variations, by name; None for a variation that does not apply."""
        step = self.trials.step
        return {name: self._varied((name,), step, sizes=step.call.used) for name in (*VARIATIONS, OTHER_SEED)}

    @cached_property
    def joined(self) -> Mapping[str, Trials | None]:
        """By the name of a variation that applies, the trials of it along with all that hardly change the values.

        They are on a few samples. What passes there need not be run by itself. A loss may overflow by its targets, so
        that these are scaled as well; where fp32 fails too, larger ones may be outside of its domain.
        """
        alike = tuple(name for name in NEARLY_THE_SAME if self.variations[name] is not None)
        step = self.trials.step
        few = step if self.few is None else replace(step, call=step.call.on_samples(self.few))
        sizes = step.call.used if self.trials.numerics else frozenset(step.call.batch)
        found = dict.fromkeys(alike, self._varied(alike, few, sizes=sizes))
        # Scale first: flags of 0 and 1 are not scaled, and noise would disguise them.
        scaled = (name for name in VARIATIONS if self.variations[name] is not None and name not in alike)
        return found | {name: self._varied((name, *alike), few, sizes=sizes) for name in scaled}

    def _varied(self, names: Iterable[str], step: FailingStep, *, sizes: frozenset[str]) -> Trials | None:
        """Return the trials of a step varied in all of these ways; None if one of them does not apply."""
        for name in names:
            if name == OTHER_SEED:
                seed = (step.randomness.seed or 0) + 1
                varied = step.varied(training=step.mode.training, seed=seed) if self.random else None
            else:
                call = VARIATIONS[name](step.call, sizes)
                varied = replace(step, call=call) if call is not None else None
            if varied is None:
                return None
            step = varied
        return self.trials.on(step)
