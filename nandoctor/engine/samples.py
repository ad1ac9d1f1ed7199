"""Finds what is to blame by runs without it: samples of the batch, and how these differ; one of several ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from nandoctor.autocast.policy import REFERENCE, Policy
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.running_op import RunningOp
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.engine.call import Call
from nandoctor.engine.module_state import EndedEarly
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import ModelError
from nandoctor.evidence.edits import OpSite, SingleEdit
from nandoctor.evidence.report import Origin
from nandoctor.evidence.trace import Place, Trace
from nandoctor.text import MAX_SAMPLES_LISTED, number
from nandoctor.torch_compat import running_node
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines
from nandoctor.tracing.op_tracer import find_passed_on
from nandoctor.tracing.tensor_stats import all_finite, format_of, has_nonfinite, numbers_in, walk_tensors
from nandoctor.trees import tree_map

_OF_SAMPLES = Watch(stage="samples")
_CLOSER = Watch(stage="closer look")
_SPARE_RUNS = 6
"""Runs beyond the two for each halving that find one sample: for a second one, and where both halves fail."""
_FEW = 3
_MOST_APART = 4
"""As many samples are run one by one."""
_ALIKE = 1e-2
"""The share of what a sample differs from the next one by that it may change if it is moved."""
_NOISE = 1e-5
"""A batch of another order takes other kernels: fp32 rounds to 6e-8 in each of many layers."""
_MOST_DIFFERENCES = 2
_FAR = 8.0
"""How many times as large a sample is as all others, if its size is worth a word."""


class _InDoubtError(Exception):
    """Samples fail together that do not fail apart, or too many runs would be needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What has to happen again in a run that fails: the `origin` makes non-finite values, under the `policy` too.

    `ends_there`: nothing that comes after the origin is asked for; else that the run fails as `failing` does.
    """

    origin: Origin
    policy: Policy | None
    failing: Trace
    ends_there: bool

    def shows(self, step: FailingStep, samples: KeepSamples) -> bool:
        """Return True if the step fails again with some of its samples."""
        origin = self.origin
        if origin.phase == "backward" or (origin.op is None and self.failing.finite):
            watch = replace(_OF_SAMPLES, statistics="none", backward=True, ends_early=True)
            return bool(step.run(self.policy, watch, (samples,)).trace.bad_gradients)
        if origin.op is None:
            trace = step.run(self.policy, _OF_SAMPLES, (samples,)).trace
            return self.ends_there or trace.fails_as(self.failing)
        reached: list[bool] = []
        kinds = origin.elements.kinds
        but_masks = bool(kinds) and "-inf" not in kinds

        def look(owner: Callable[[], Place], call: Invocation, proceed: Proceed) -> Any:
            made = proceed(call)
            if call.name == origin.op and (origin.phase == "loss" or owner().module == origin.place.module):
                lines = find_lines()  # those of a derivative are its function's
                is_there = running_node() is not None or (lines.inside or lines.source) == origin.source
                if is_there and has_nonfinite(made, but_masks=but_masks):
                    reached.append(True)
                    if self.ends_there:
                        raise EndedEarly
            return made

        watch = replace(_OF_SAMPLES, statistics="none" if self.ends_there else "ranges")
        with suppress(EndedEarly):
            trace = step.run(self.policy, replace(watch, look=look), (samples,)).trace
            return bool(reached) and trace.fails_as(self.failing)
        return True


def find_guilty(step: FailingStep, flagged: tuple[int, ...], symptom: Symptom) -> tuple[int, ...] | None:
    """Return the samples with which the step fails and without which it does not; None in doubt.

    `flagged` are the rows in which the first non-finite tensor was so, () if it has no row for each sample: they are
    the samples if few runs bear that out.
    """
    size = step.call.sample_count
    if size is None or size < 2:
        return None if size is None else tuple(range(size))
    runs = _Runs(step, symptom, size)
    with suppress(_InDoubtError, ModelError):
        found = flagged if flagged and runs.confirm(flagged) else runs.narrow(tuple(range(size)))
        healthy = tuple(sample for sample in range(size) if sample not in found)
        # If only some rows are non-finite whichever samples are there, it is their place that makes them so.
        is_of_place = not healthy and 0 < len(flagged) < min(size, MAX_SAMPLES_LISTED)
        # If rows may be time steps, two healthy ones tell.
        rows = runs.fill(_spread(healthy))
        are_samples = not step.call.may_be_time_first or (len(set(rows)) > 1 and _stand_alone(step, rows))
        return found if are_samples and not is_of_place else None
    return None


class _Runs:
    """Runs of a step with some of its samples; each set is run once."""

    def __init__(self, step: FailingStep, symptom: Symptom, size: int) -> None:
        self._step, self._symptom, self._size = step, symptom, size
        self._left = 2 * math.ceil(math.log2(size)) + _SPARE_RUNS
        self._known: dict[tuple[int, ...], bool] = {}
        self._beside: tuple[int, ...] = ()  # a sample that is fine, for a loss that takes none of some others
        self._is_whole = False

    def fails(self, samples: tuple[int, ...]) -> bool:
        """Return True if the step fails with these samples alone."""
        while samples not in self._known:
            if not self._left:
                raise _InDoubtError
            self._left -= 1
            try:
                self._known[samples] = self._symptom.shows(self._step, KeepSamples(samples=self.fill(samples)))
            except ModelError:
                if self._is_whole:
                    raise
                self._is_whole = True
        return self._known[samples]

    def fill(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Return a batch of the samples that the model takes: the variance over one is 0, or the size may be fixed."""
        size = self._size if self._is_whole else max(2, len(samples))
        return tuple(islice(cycle(samples), size))

    def confirm(self, flagged: tuple[int, ...]) -> bool:
        """Return True if two of these samples fail beside one of the others, or if all of them fail only together.

        A few of the others may fail where all of them do not, as a label that occurs once does in a contrastive loss.
        """
        is_cut = len(flagged) == MAX_SAMPLES_LISTED
        others = () if is_cut else tuple(sample for sample in range(self._size) if sample not in flagged)
        few_fail = bool(others) and self.fails(_spread(others))
        if few_fail and self.fails(others):
            return False
        self._beside = others if few_fail else others[:1]
        alone = [self.fails((sample, *self._beside)) for sample in dict.fromkeys((flagged[0], flagged[-1]))]
        if any(alone) or not others:
            return all(alone)
        middle = len(flagged) // 2
        return not any(self.fails((*half, *self._beside)) for half in (flagged[:middle], flagged[middle:]) if half)

    def narrow(self, samples: tuple[int, ...], owed: int | None = None) -> tuple[int, ...]:
        """Return which of the samples, with which the step fails, fail by themselves; others need `owed` runs more."""
        owed = -len(self._known) if owed is None else owed  # those may be among the runs that it takes
        if len(samples) == 1:
            return samples
        if owed + _least_runs(len(samples)) > self._left:
            raise _InDoubtError
        middle = len(samples) // 2
        parts = (samples[:middle], samples[middle:]) if len(samples) > _MOST_APART else [(it,) for it in samples]
        found = [part for part in parts if self.fails((*part, *(it for it in self._beside if it not in part)))]
        if not found:
            raise _InDoubtError
        *before, last = found
        least = owed + _least_runs(len(last))
        return tuple(sample for part in before for sample in self.narrow(part, least)) + self.narrow(last, owed)


def _least_runs(num_samples: int) -> int:
    """Return how many runs it takes at least to find those to blame, if the step fails with all of these."""
    if num_samples <= _MOST_APART:
        return num_samples if num_samples > 1 else 0
    return 2 + _least_runs(num_samples // 2)


def _spread(samples: Sequence[int]) -> tuple[int, ...]:
    """Return a few of the samples, the first and the last among them."""
    count = min(_FEW, len(samples))
    return tuple(samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count))


def _stand_alone(step: FailingStep, samples: tuple[int, ...]) -> bool:
    """Return True if the output moves with a batch that is moved by one sample; False if it shows no difference.

    Then what a sample gives depends neither on its place nor on the others.
    """
    # In eval mode there is no dropout, and no BatchNorm that mixes samples.
    calm = replace(step, mode=replace(step.mode, training=False))
    first, second = (
        calm.run(REFERENCE, _OF_SAMPLES, (KeepSamples(samples=kept),)).output
        for kept in (samples, (*samples[1:], samples[-1]))
    )
    before, after = (
        {path: leaf for path, leaf in walk_tensors(output) if leaf.is_floating_point()} for output in (first, second)
    )
    pairs = [(one, after[path]) for path, one in before.items() if path in after and one.shape == after[path].shape]
    alike = [_is_alike(*pair) for pair in pairs if pair[0].shape[:1] == (len(samples),) and pair[0].numel()]
    known = [is_alike for is_alike in alike if is_alike is not None]
    return bool(known) and all(known)


def _is_alike(before: torch.Tensor, after: torch.Tensor) -> bool | None:
    """Return True if `after` is `before`, moved by one row; None if the rows hardly differ.

    What is computed of pairs, as of images and their captions, moves along two dimensions of one length.
    """
    before, after = (values.detach().double().nan_to_num(0.0, 0.0, 0.0) for values in (before, after))
    varies, noise = float((before[1:] - before[:-1]).abs().max()), _NOISE * float(before.abs().max())
    if varies <= noise / _ALIKE:
        return None
    moved = [(before[1:], after[:-1])]
    if before.dim() > 1 and before.shape[0] == before.shape[1]:
        moved.append((before[1:, 1:], after[:-1, :-1]))
    return any(bool((old - new).abs().max() <= _ALIKE * varies) for old, new in moved)


def describe_difference(call: Call, guilty: tuple[int, ...]) -> str:
    """Describe what sets the samples to blame apart in the batch, "" if nothing does at sight.

    An array that the model does not take and that is not finite is a saved output.
    """
    size = call.sample_count or 0
    others = [sample for sample in range(size) if sample not in guilty]
    rows = {
        name: value.detach().double().reshape(size, -1)
        for name, value in call.batch.items()
        if is_dense(value) and value.shape[:1] == (size,) and value.numel() and not value.is_complex()
        if name in call.used or all_finite(value)
    }
    for rule in _DIFFERENCES if guilty and others else ():  # what a later one finds beside it may be chance
        found = {name: rule(values[list(guilty)], values[others]) for name, values in rows.items()}
        if told := [f"`{name}` {difference}" for name, difference in found.items() if difference is not None]:
            return "; ".join(told[:_MOST_DIFFERENCES])
    return ""


def _differ_by_nan(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    ours, others = torch.isfinite(mine).all(1), torch.isfinite(theirs).all(1)
    return "has NaN or Inf, the others do not" if not bool(ours.any()) and bool(others.all()) else None


def _differ_by_constancy(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Describe samples that are one value all over; those of a single element are not compared."""
    ours, others = ((values == values[:, :1]).all(1) for values in (mine, theirs))
    if mine.shape[1] < 2 or not bool(ours.all()) or bool(others.any()):
        return None
    is_one = bool((mine == mine[0, 0]).all())
    return f"is {number(float(mine[0, 0]))} all over, the others vary" if is_one else "is constant, the others vary"


def _differ_by_size(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    ours, largest = float(mine.abs().amax(1).min()), float(theirs.abs().max())
    if largest and ours >= _FAR * largest:
        return f"reaches {number(float(mine.abs().max()))}, {number(ours / largest)} times the others"
    ours, least = float(mine.abs().max()), float(theirs.abs().amax(1).min())
    return f"reaches only {number(ours)}, the others {number(least)} or more" if least > _FAR * ours else None


def _differ_by_sign(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    is_negative = bool((mine < 0).any(1).all()) and bool((theirs >= 0).all())
    return f"reaches {number(float(mine.min()))}, the others stay above 0" if is_negative else None


_DIFFERENCES = (_differ_by_nan, _differ_by_constancy, _differ_by_size, _differ_by_sign)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MakeFinite(SingleEdit):
    """Put a number for the NaN and Inf that an op makes, but not for what it was given; for a run alone, no fix."""

    site: OpSite

    def run(self, op: RunningOp) -> Any:
        taken = [values for _, tensor in op.tensors() if (values := numbers_in(tensor)) is not None]
        given = [values.clone() for values in taken if not all_finite(values)]  # before it is written to
        return tree_map(partial(_made_finite, op, given), op.run())

    def works_in_place(self, *, has_out: bool) -> bool:
        return True


def _made_finite(op: RunningOp, given: Sequence[torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or format_of(value.dtype) is None:
        return value
    passed_on = find_passed_on(op.name, given, value)
    if passed_on is None:  # what was given may be anywhere
        return value
    made = ~torch.isfinite(value) & ~passed_on
    return value.masked_fill_(made, 1.0) if op.is_mutable else value.masked_fill(made, 1.0)


def trace_without(
    step: FailingStep, sites: Iterable[OpSite], policy: Policy | None = None, watch: Watch = _CLOSER
) -> Trace | None:
    """Return the trace of a run in which all that these ops make is finite; None if it cannot be run."""
    with suppress(ModelError):
        return step.run(policy, watch, [_MakeFinite(site=site) for site in sites]).trace
    return None


def fails_without(step: FailingStep, failing: Trace, sites: Sequence[OpSite]) -> bool:
    """Return True if the step fails as in the run `failing` though all that these ops make is finite; also in doubt."""
    trace = trace_without(step, sites, REFERENCE if failing.policy == REFERENCE.label else None)
    return trace is None or trace.fails_as(failing)


def is_read(step: FailingStep, name: str) -> bool:
    """Return True if forward or loss reads this array of the batch: with no values in it, something is another."""
    batch, array = step.call.batch, step.call.batch[name]
    empty = torch.empty((0, *array.shape[1:]), dtype=array.dtype, device=array.device)  # a sparse one has no slices
    emptied = replace(step, call=replace(step.call, batch={**batch, name: empty}))
    try:
        made, without = (it.run(watch=_OF_SAMPLES).trace for it in (step, emptied))
    except ModelError:
        return True
    return without.raised is not None or (made.output, made.loss) != (without.output, without.loss)
