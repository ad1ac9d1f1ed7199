"""Tries edits on the failing step, within a budget, and judges each against fp32.

In: the failing step. Out: `Trials`, whose `judge` gives a `Judgement`; nothing is run twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from nandoctor.autocast.policy import REFERENCE
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.changes import Snippet, SourcePatch
from nandoctor.evidence.edits import KeepSamples, UseFormat
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.report import TrialOutcome
from nandoctor.fixes.variations import VARIATIONS, surrogate_loss
from nandoctor.replaying.code_swap import CannotRunError
from nandoctor.replaying.interventions import flatten
from nandoctor.replaying.memory import is_out_of_memory
from nandoctor.replaying.runner import Change, FailingStep, Outcome, Watch
from nandoctor.tracing.tensor_stats import numbers_in
from nandoctor.tracing.tensor_tree import walk_tensors

TOLERANCE = 0.01
"""In every sample a fixed run's output differs from fp32's by no more than this share of the largest magnitude there.

fp16 rounds to 5e-4 and a deep network loses a few bits more; a changed computation is off by more than that. Where a
model magnifies rounding further, or a sample is small because large terms cancel, fp32 shows it as well, beside
float64: what it loses there, in fp16's coarser units, is allowed for."""
NOISE = 4 * 2.0 ** (24 - 11)
"""fp16 carries 11 bits and fp32 24; 4 because one rounding is luckier than another."""
MOST_NOISE = 0.03
"""And never more than this share of the largest magnitude in the whole tensor."""
_SMALLEST_SHARE = 1e-3
GRADIENT_TOLERANCE = 0.1
"""The share for all gradients together, norm of the difference over norm: they pass twice as many roundings."""

MOST_FP64_PARAMETERS = 250_000_000
"""2 GB of weights in float64, on top of those that are there."""

Precision = Literal["autocast", "fp32"]


class BudgetSpent(Exception):  # noqa: N818  (an end, not an error)
    """No further trial may be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The outcome of a trial, and whether it passes: finite, and in agreement with fp32."""

    outcome: TrialOutcome
    passes: bool


class TrialBudget:
    """How much may still be tried of one step: at most `max_trials` runs, in at most `time_s` seconds from now on.

    `out_of_memory`: a run did not fit into memory, and none was tried after it.
    """

    def __init__(self, max_trials: int | None = None, time_s: float | None = None) -> None:
        self._max_trials, self._time_s = max_trials, time_s
        self._started = time.monotonic()
        self.num_run = 0
        self.out_of_memory = False

    def spend(self) -> None:
        """Pay for one more run; raise BudgetSpent where that is too much."""
        elapsed_s = time.monotonic() - self._started
        too_many = self._max_trials is not None and self.num_run >= self._max_trials
        if too_many or (self._time_s is not None and elapsed_s > self._time_s):
            raise BudgetSpent
        self.num_run += 1


class Trials:
    """The trials of one failing step.

    With `numerics` the step fails in fp32 as well: an edit is then judged against fp32 with the same edit, and must not
    change what was finite without it. Gradients have to be finite where fp32's are; with a loss scale they have to
    agree too, which is asked too much where none keeps fp16's from underflowing.
    """

    def __init__(self, step: FailingStep, budget: TrialBudget, *, numerics: bool) -> None:
        self.step = step
        self._budget = budget
        self._numerics = numerics
        self._gradient_tolerance = GRADIENT_TOLERANCE if step.loss_scale != 1 else math.inf
        self._judgements: dict[frozenset[Change], Judgement] = {}
        self._references: dict[frozenset[Change], _Result] = {}

    @cached_property
    def with_gradients(self) -> Trials:
        """The trials of the same step with a backward pass, by a surrogate loss where no loss is known."""
        if self.step.loss is not None:
            return self
        return Trials(replace(self.step, loss=surrogate_loss), self._budget, numerics=self._numerics)

    @cached_property
    def variations(self) -> Mapping[str, Trials]:
        """The trials of the step, gradients included, on batches near to the one that failed."""
        step = self.with_gradients.step
        batches = {name: vary(step.batch, step.used) for name, vary in VARIATIONS.items()}
        return {
            name: Trials(replace(step, batch=batch), self._budget, numerics=self._numerics)
            for name, batch in batches.items()
        }

    def varied(self, *, training: bool, seed: int | None) -> Trials:
        """The trials of the same step in this mode and with this seed, out of the same budget."""
        if (training, seed) == (self.step.training, self.step.seed):
            return self
        return Trials(replace(self.step, training=training, seed=seed), self._budget, numerics=self._numerics)

    @property
    def num_run(self) -> int:
        """How often the step was run so far, by all trials that share the budget."""
        return self._budget.num_run

    @property
    def num_judged(self) -> int:
        """How many sets of edits were judged so far."""
        return len(self._judgements)

    def look(self, *edits: Change) -> TrialOutcome | None:
        """What the step gives with the edits, beside fp32 with the same samples; None where it cannot run.

        Raises:
            BudgetSpent: nothing more may be run.
        """
        made = self._execute(edits, "autocast")
        samples = tuple(edit for edit in _key(edits) if isinstance(edit, KeepSamples))
        comparison = _compare(made, self._reference(samples))
        if not made.ran:
            return None
        finite = comparison.finite and (made.finite or not self._numerics)
        return TrialOutcome(finite=finite, max_rel_err=comparison.max_rel_err if finite else None)

    def judge(self, *edits: Change) -> Judgement:
        """Run the step with the edits, and compare; what was judged before is not run again.

        Raises:
            BudgetSpent: nothing more may be run.
        """
        key = _key(edits)
        if key not in self._judgements:
            self._judgements[key] = self._judge(edits)
        return self._judgements[key]

    def passes(self, *edits: Change) -> bool:
        """Whether the step with these edits is finite and agrees with fp32; raises BudgetSpent like `judge`."""
        return self.judge(*edits).passes

    def _judge(self, edits: tuple[Change, ...]) -> Judgement:
        selects = any(isinstance(edit, KeepSamples) for edit in _key(edits))
        reference = self._reference(edits if self._numerics or selects else ())
        made = self._execute(edits, "autocast")
        comparison = _compare(made, reference)
        finite = comparison.finite and (reference.finite or not (self._numerics or selects))
        if not finite:
            return Judgement(outcome=TrialOutcome(finite=False, max_rel_err=None), passes=False)
        agrees = comparison.agrees()
        if not agrees:
            exact = self._exact(edits if self._numerics or selects else ())
            comparison = _compare(made, reference, exact=exact)
            agrees = comparison.agrees(unsure=_compare(exact, reference))
        max_rel_err = comparison.max_rel_err
        if self._numerics and not selects:
            # What was finite before must be no other value now; what was not has nothing to agree with.
            changes = _compare(reference, self._reference(()))
            agrees = agrees and changes.agrees()
            max_rel_err = max(max_rel_err, changes.max_rel_err)
        return Judgement(
            outcome=TrialOutcome(finite=True, max_rel_err=max_rel_err),
            passes=agrees and comparison.gradient_error <= self._gradient_tolerance,
        )

    def _exact(self, edits: tuple[Change, ...]) -> _Result:
        """The step in float64: what fp32 itself is unsure of, no fix has to agree with."""
        return self._reference((*edits, UseFormat(format=FP64)))

    def _reference(self, edits: tuple[Change, ...]) -> _Result:
        key = _key(edits)
        if key not in self._references:
            self._references[key] = self._execute(edits, "fp32")
        return self._references[key]

    def _execute(self, edits: tuple[Change, ...], precision: Precision) -> _Result:
        self._budget.spend()
        if _is_too_large(self.step.model, edits):
            return _keep(None)
        has_loss = self.step.loss is not None
        watch = Watch(stage=f"trial {self.num_run}", statistics="none", backward=has_loss, keep=has_loss)
        try:
            outcome = self.step.run(REFERENCE if precision == "fp32" else None, watch, edits)
            # The value of a surrogate loss means nothing: it may cancel to a number without a correct digit.
            return _keep(replace(outcome, loss=None) if self.step.loss is surrogate_loss else outcome)
        except LossError:
            # Of a loss that cannot be computed nothing follows for the change; fewer samples may not suit it.
            if self.step.loss is surrogate_loss or any(isinstance(edit, KeepSamples) for edit in _key(edits)):
                return _keep(None)
            raise
        except (ModelError, CannotRunError, RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):  # says nothing about the change, and the next one would fare no better
                self._budget.out_of_memory = True
                raise BudgetSpent from error
            return _keep(None)  # a changed model may not run at all


def _key(changes: Iterable[Change]) -> frozenset[Change]:
    """What two sets of changes that do the same have in common."""
    printed = {change for change in changes if isinstance(change, SourcePatch | Snippet)}
    edits = (change for change in changes if not isinstance(change, SourcePatch | Snippet))
    return frozenset(printed.union(flatten(edits)))


def _is_too_large(model: nn.Module, edits: tuple[Change, ...]) -> bool:
    """Tell whether a float64 run was asked for that may not fit beside the model."""
    in_fp64 = any(isinstance(edit, UseFormat) and edit.format is FP64 for edit in _key(edits))
    return in_fp64 and sum(parameter.numel() for parameter in model.parameters()) > MOST_FP64_PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What a run gave, without its graph; `ran` is False where it could not, or raised on its way."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    ran: bool

    @property
    def finite(self) -> bool:
        tensors = (*self.values.values(), *self.gradients.values())
        return self.ran and all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """For each sample of one tensor the largest difference and the largest magnitude, and the latter in all of it."""

    largest: torch.Tensor
    magnitude: torch.Tensor
    overall: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """One run beside another: whether it is finite wherever that is, and how far it is from it there."""

    finite: bool
    values: Mapping[str, _Differences]
    gradient_error: float

    @property
    def max_rel_err(self) -> float:
        return max((float((d.largest / d.magnitude).max()) for d in self.values.values()), default=0.0)

    def agrees(self, *, unsure: _Comparison | None = None) -> bool:
        """Whether all differences are within what honest rounding costs; `unsure` is fp32 beside float64."""
        return all(self._is_honest(name, unsure) for name in self.values)

    def _is_honest(self, name: str, unsure: _Comparison | None) -> bool:
        ours = self.values[name]
        allowed = TOLERANCE * ours.magnitude
        other = unsure.values.get(name) if unsure is not None and unsure.finite else None
        if other is not None:
            noise = (NOISE * other.largest).clamp(max=MOST_NOISE * ours.overall)
            allowed = torch.maximum(allowed, noise)
        return bool((ours.largest <= allowed).all())


def _keep(outcome: Outcome | None) -> _Result:
    if outcome is None:
        return _Result(values={}, gradients={}, ran=False)
    found = ((path, numbers_in(leaf)) for path, leaf in walk_tensors(outcome.output))
    values = {f"output.{path}": values for path, values in found if values is not None}
    if outcome.loss is not None:
        values["loss"] = outcome.loss.detach()
    return _Result(values=values, gradients=outcome.gradients or {}, ran=outcome.trace.raised is None)


def _compare(made: _Result, reference: _Result, *, exact: _Result | None = None) -> _Comparison:
    """`made` beside the reference; with an `exact` result, beside the range between the two."""
    finite, values = made.ran and reference.ran, {}
    for name, theirs in reference.values.items():
        ours = made.values.get(name)
        if ours is None or ours.shape != theirs.shape:
            return _Comparison(finite=False, values={}, gradient_error=math.inf)
        sound = torch.isfinite(theirs)
        finite = finite and bool(torch.isfinite(ours[sound]).all())
        other = exact.values.get(name) if exact is not None and exact.ran else None
        nearest = theirs if other is None or other.shape != theirs.shape else _nearest_between(ours, theirs, other)
        if theirs.numel():
            values[name] = _differences(ours, nearest, sound)
    names = made.gradients.keys() & reference.gradients
    gradients = [(made.gradients[name], reference.gradients[name]) for name in names]
    finite = finite and all(bool(torch.isfinite(ours[torch.isfinite(theirs)]).all()) for ours, theirs in gradients)
    return _Comparison(finite=finite, values=values, gradient_error=_norm_difference(gradients) if finite else math.inf)


def _nearest_between(ours: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The number between the two ends that is nearest to ours."""
    ends = one.double(), other.double()
    return ours.double().clamp(torch.minimum(*ends), torch.maximum(*ends))


def _differences(ours: torch.Tensor, theirs: torch.Tensor, sound: torch.Tensor) -> _Differences:
    """Sample by sample along dimension 0, over the elements that are `sound`."""
    rows = (ours.shape[0], -1) if ours.dim() else (1, 1)
    difference = torch.where(sound, ours.double() - theirs.double(), 0.0).abs().reshape(rows).amax(1)
    difference = torch.where(difference <= _grain(ours.dtype), 0.0, difference)
    magnitude = torch.where(sound, theirs.double(), 0.0).abs().reshape(rows).amax(1)
    overall = float(magnitude.max())
    # A sample of zeros is measured by the others.
    return _Differences(
        largest=torch.nan_to_num(difference, nan=math.inf),
        magnitude=magnitude.clamp(min=_SMALLEST_SHARE * overall if overall else 1.0),
        overall=overall,
    )


def _grain(dtype: torch.dtype) -> float:
    """The smallest number of a format: what is nearer than that, it cannot tell apart."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _norm_difference(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Norm of all differences over the norm of all of the second, where those are finite."""
    difference = norm = 0.0
    for ours, theirs in pairs:
        sound = torch.isfinite(theirs)
        difference += float((ours[sound].double() - theirs[sound].double()).square().sum())
        norm += float(theirs[sound].double().square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
