"""Tries edits on the failing step, within a budget, and judges each against fp32.

In: a function that runs the step. Out: `Trials`, whose `judge` gives a `Judgement`; nothing is run twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from nandoctor.engine.interventions import flatten
from nandoctor.engine.runner import Outcome
from nandoctor.engine.tracer import walk_tensors
from nandoctor.evidence.edits import Edit, KeepSamples, UseFormat
from nandoctor.evidence.formats import BF16, FP64
from nandoctor.evidence.report import TrialOutcome

TOLERANCE = 0.02
"""A cure's output and loss differ from fp32's by no more than this share of the largest magnitude there.

fp16 rounds to 5e-4 and a deep network loses a few bits more; a changed computation is off by more than that. Where a
model magnifies honest rounding further, a quarter of bf16's own distance is allowed for: bf16 does not overflow, and is
eight times coarser than fp16."""
MOST_TOLERANCE = 0.1
GRADIENT_TOLERANCE = 0.1
"""The same for all gradients together, norm of the difference over norm: they pass twice as many roundings."""

Precision = Literal["autocast", "fp32"]
RunStep = Callable[[tuple[Edit, ...], Precision], Outcome | None]
"""Runs the failing step with edits, under autocast or in fp32; None where the edited step cannot run at all."""


class BudgetSpent(Exception):  # noqa: N818  (an end, not an error)
    """No further trial may be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much may be tried: runs of the step, and seconds; None is without limit."""

    max_trials: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The outcome of a trial, and whether it is a cure: finite, and in agreement with fp32."""

    outcome: TrialOutcome
    cures: bool


class Purse:
    """What is left of a budget, shared by all trials of one step."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._started = time.monotonic()
        self.num_run = 0

    def spend(self) -> None:
        """Pay for one more run; raises BudgetSpent where that is too much."""
        elapsed_s = time.monotonic() - self._started
        most, longest_s = self._budget.max_trials, self._budget.time_s
        if (most is not None and self.num_run >= most) or (longest_s is not None and elapsed_s > longest_s):
            raise BudgetSpent
        self.num_run += 1


class Trials:
    """The trials of one failing step.

    With `numerics` the step fails in fp32 as well: an edit is then judged against fp32 with the same edit, and must not
    change what was finite without it. Gradients have to be finite where fp32's are; with `strict_gradients` they have
    to agree too, which is asked too much where no loss scale keeps fp16's from underflowing.
    """

    def __init__(self, run: RunStep, purse: Purse, *, numerics: bool, strict_gradients: bool = True) -> None:
        self._run = run
        self._purse = purse
        self._numerics = numerics
        self._gradient_tolerance = GRADIENT_TOLERANCE if strict_gradients else math.inf
        self._judgements: dict[frozenset[Edit], Judgement] = {}
        self._references: dict[frozenset[Edit], _Result] = {}
        self._exact: _Result | None = None

    @property
    def num_judged(self) -> int:
        """How many sets of edits were judged so far."""
        return len(self._judgements)

    def look(self, *edits: Edit) -> TrialOutcome | None:
        """What the step gives with the edits, beside fp32 with the same samples; None where it cannot run.

        Raises:
            BudgetSpent: nothing more may be run.
        """
        made = self._execute(edits, "autocast")
        samples = tuple(edit for edit in flatten(edits) if isinstance(edit, KeepSamples))
        finite, errors = _compare(made, self._reference(samples))
        if not made.ran:
            return None
        finite = finite and (made.finite or not self._numerics)
        return TrialOutcome(finite=finite, max_rel_err=errors.values if finite else None)

    def judge(self, *edits: Edit) -> Judgement:
        """Run the step with the edits, and compare; what was judged before is not run again.

        Raises:
            BudgetSpent: nothing more may be run.
        """
        key = frozenset(flatten(edits))
        if key not in self._judgements:
            self._judgements[key] = self._judge(edits)
        return self._judgements[key]

    def cures(self, *edits: Edit) -> bool:
        """Whether the step with these edits is finite and agrees with fp32; raises BudgetSpent like `judge`."""
        return self.judge(*edits).cures

    def _judge(self, edits: tuple[Edit, ...]) -> Judgement:
        selects = any(isinstance(edit, KeepSamples) for edit in flatten(edits))
        reference = self._reference(edits if self._numerics or selects else ())
        made = self._execute(edits, "autocast")
        finite, errors = _compare(made, reference)
        if finite and errors.values > TOLERANCE and not (self._numerics or selects):
            finite, errors = _compare(made, reference, exact=self._exact_result())
        if self._numerics and not selects:
            # What was finite before must be no other value now; what was not has nothing to agree with.
            _, changes = _compare(reference, self._reference(()))
            errors = _Errors(values=max(errors.values, changes.values), gradients=errors.gradients)
        finite = finite and (reference.finite or not (self._numerics or selects))
        tolerance = self._tolerance(edits, reference) if finite and errors.values > TOLERANCE else TOLERANCE
        agrees = errors.values <= tolerance and errors.gradients <= self._gradient_tolerance
        return Judgement(
            outcome=TrialOutcome(finite=finite, max_rel_err=errors.values if finite else None),
            cures=finite and agrees,
        )

    def _tolerance(self, edits: tuple[Edit, ...], reference: _Result) -> float:
        """What honest rounding may cost, judged by bf16."""
        if any(isinstance(edit, UseFormat) for edit in flatten(edits)):
            return TOLERANCE
        coarse, errors = _compare(self._execute((*edits, UseFormat(format=BF16)), "autocast"), reference)
        return min(max(TOLERANCE, errors.values / 4), MOST_TOLERANCE) if coarse else TOLERANCE

    def _exact_result(self) -> _Result:
        """The step in float64: what fp32 itself is unsure of, no cure has to agree with."""
        if self._exact is None:
            self._exact = self._execute((UseFormat(format=FP64),), "fp32")
        return self._exact

    def _reference(self, edits: tuple[Edit, ...]) -> _Result:
        key = frozenset(flatten(edits))
        if key not in self._references:
            self._references[key] = self._execute(edits, "fp32")
        return self._references[key]

    def _execute(self, edits: tuple[Edit, ...], precision: Precision) -> _Result:
        self._purse.spend()
        return _keep(self._run(edits, precision))


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
class _Errors:
    """How far a run is from another: of output and loss, and of the gradients."""

    values: float
    gradients: float


def _keep(outcome: Outcome | None) -> _Result:
    if outcome is None:
        return _Result(values={}, gradients={}, ran=False)
    values = {
        f"output.{path}": leaf.detach()
        for path, leaf in walk_tensors(outcome.output)
        if leaf.is_floating_point() and leaf.layout == torch.strided and not leaf.is_nested
    }
    if outcome.loss is not None:
        values["loss"] = outcome.loss.detach()
    return _Result(values=values, gradients=outcome.gradients or {}, ran=outcome.trace.raised is None)


def _compare(made: _Result, reference: _Result, *, exact: _Result | None = None) -> tuple[bool, _Errors]:
    """Whether `made` is finite wherever the reference is, and how far it is from it there.

    With an `exact` result the distance is that to the range between the two.
    """
    finite, values = made.ran, 0.0
    for name, theirs in reference.values.items():
        ours = made.values.get(name)
        if ours is None or ours.shape != theirs.shape:
            return False, _Errors(values=math.inf, gradients=math.inf)
        sound = torch.isfinite(theirs)
        finite = finite and bool(torch.isfinite(ours[sound]).all())
        other = exact.values.get(name) if exact is not None and exact.ran else None
        nearest = theirs if other is None or other.shape != theirs.shape else _nearest_between(ours, theirs, other)
        values = max(values, _largest_difference(ours[sound], nearest[sound]))
    gradients = [
        (made.gradients[name], theirs) for name, theirs in reference.gradients.items() if name in made.gradients
    ]
    finite = finite and all(bool(torch.isfinite(ours[torch.isfinite(theirs)]).all()) for ours, theirs in gradients)
    return finite, _Errors(values=values, gradients=_norm_difference(gradients) if finite else math.inf)


def _nearest_between(ours: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The number between the two ends that is nearest to ours."""
    ends = one.double(), other.double()
    return ours.double().clamp(torch.minimum(*ends), torch.maximum(*ends))


def _largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of `theirs`; NaN counts as infinitely far."""
    if not theirs.numel():
        return 0.0
    difference = float((ours.double() - theirs.double()).abs().max())
    largest = float(theirs.double().abs().max())
    error = difference / largest if largest else difference
    return math.inf if math.isnan(error) else error


def _norm_difference(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Norm of all differences over the norm of all of the second, where those are finite."""
    difference = norm = 0.0
    for ours, theirs in pairs:
        sound = torch.isfinite(theirs)
        difference += float((ours[sound].double() - theirs[sound].double()).square().sum())
        norm += float(theirs[sound].double().square().sum())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)
