"""Tries edits on the failing step, within a budget, and judges each against fp32; a judged set is not run again."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from nandoctor.autocast.policy import REFERENCE, Policy
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.setting import UseFormat
from nandoctor.engine.interventions import CannotRunError
from nandoctor.engine.module_state import is_large
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.engine.user_code import is_wrong_call
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.edits import Change, Snippet, SourcePatch, flatten
from nandoctor.evidence.formats import BF16, FP32, FP64
from nandoctor.evidence.report import TrialOutcome
from nandoctor.evidence.trace import Trace
from nandoctor.fixes.agreement import (
    BF16_TOLERANCE,
    TOLERANCE,
    Agreement,
    Result,
    compare_runs,
    gradient_error,
    gradients_finite,
    keep,
    values_of,
)
from nandoctor.fixes.made_up_loss import surrogate_loss
from nandoctor.machine import is_out_of_memory
from nandoctor.ops import UNFILLED
from nandoctor.tracing.dispatch_hook import Invocation, Proceed
from nandoctor.tracing.tensor_stats import all_finite, has_nonfinite

GRADIENT_TOLERANCE = 0.1
"""The largest relative error in norm of all gradients together, which pass through twice as many roundings."""

MOST_FP64_PARAMETERS = 250_000_000
"""2 GB of weights in float64, besides those in memory already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The outcome of a trial, and whether it passes: it is finite and agrees with fp32.

    `reference` is what the error of the outcome is counted from, "" if there is nothing else. `workaround`: it would
    pass, but for what this sentence says that it replaces.
    """

    outcome: TrialOutcome
    passes: bool
    reference: str = ""
    workaround: str | None = None


@dataclass(eq=False)
class Trials:
    """The trials of one failing step; every method that runs one raises `BudgetSpent` once the budget is spent.

    With `numerics` the step fails in fp32 as well: an edit is then judged against float64 if that is finite, else
    against fp32 with the same edit, and must not change what was finite without it. With `backward`, gradients have to
    be finite where the reference's are. With a loss scale they also have to agree; without one, fp16's may underflow.

    `fails`: the step is known to give NaN or Inf, and fp32 not. `is_another`: its batch, mode or seed is not that of
    the failing step. `writes_infinities`: infinities in its output are intended; None if only a run shows that.
    `as_saved`: its output is the training's own, so what it is off fp32 is what the training's precision costs.
    """

    step: FailingStep
    budget: TrialBudget
    _: KW_ONLY
    numerics: bool
    backward: bool = True
    fails: bool = False
    is_another: bool = False
    writes_infinities: bool | None = None
    as_saved: bool = False
    _judgements: dict[frozenset[Change], Judgement] = field(default_factory=dict, init=False)
    _references: dict[frozenset[Change], Result] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.backward = self.backward and self.step.loss is not None

    @cached_property
    def with_gradients(self) -> Trials:
        """The trials of the same step with a backward pass, from a surrogate loss if no loss is known."""
        if self.backward:
            return self
        step = self.step if self.step.loss is not None else replace(self.step, loss=surrogate_loss)
        return replace(self, step=step, backward=True, fails=False)

    @cached_property
    def without_gradients(self) -> Trials:
        """The trials of the same step without a backward pass."""
        return replace(self, backward=False)

    def on(self, step: FailingStep) -> Trials:
        """Return the trials of a step with another batch or scale, with gradients, on the same budget."""
        is_another = not self._is_own_step or step.call is not self.step.call
        return replace(self, step=step, backward=True, fails=False, is_another=is_another, writes_infinities=None)

    def varied(self, *, training: bool, seed: int | None) -> Trials:
        """Return the trials of the step in this mode, with this seed."""
        if (training, seed) == (self.step.mode.training, self.step.randomness.seed):
            return self
        step = self.step.varied(training=training, seed=seed)
        return replace(self, step=step, fails=False, is_another=True, writes_infinities=self._writes_infinities)

    @property
    def _is_own_step(self) -> bool:
        return self.step.loss is not surrogate_loss and not self.is_another

    @cached_property
    def _writes_infinities(self) -> bool:
        """True if the unchanged step has infinities in fp32 too: they are intended, in another mode or batch as well.

        If not, a variation that is non-finite in both precisions (in eval mode, by a BatchNorm's statistics) fails.
        """
        if self.writes_infinities is not None:
            return self.writes_infinities
        reference = self.reference()
        return reference.ran and not reference.values_finite and not reference.has_nan

    def look(self, *edits: Change) -> TrialOutcome | None:
        """Return the outcome with the edits, compared with fp32 on the same samples; None if the step cannot run."""
        edits = tuple(edit for edit in edits if edit != UseFormat(format=self.step.low))  # it has that format already
        if self.fails and not edits:
            return TrialOutcome(finite=False, max_rel_err=None)
        judged = self._judgements.get(_key(edits)) if not self.numerics else None
        if judged is not None:
            return judged.outcome
        plain = [edit for edit in edits if isinstance(edit, UseFormat) and edit.format in (FP32, FP64)]
        made = self.reference(*(edit for edit in plain if edit.format is FP64)) if plain else self.run(*edits)
        if not made.ran:
            return None
        if not made.values_finite and (made.has_nan or not self._writes_infinities):
            return TrialOutcome(finite=False, max_rel_err=None)
        reference = self.reference(*_selections(edits))
        comparison = compare_runs(made, reference)
        finite = comparison.finite and gradients_finite(made, reference) and (made.finite or not self.numerics)
        return TrialOutcome(finite=finite, max_rel_err=comparison.max_rel_err if finite else None)

    def judge(self, *edits: Change) -> Judgement:
        """Run the step with the edits and compare; a set that was judged before is not run again."""
        key = _key(edits)
        if key not in self._judgements:
            self._judgements[key] = self._judge(edits)
        return self._judgements[key]

    def note(self, edit: Change, judgement: Judgement) -> None:
        """Record the judgement of the text that is printed for an edit as that of the edit."""
        self._judgements[_key((edit,))] = judgement

    def _judge(self, edits: tuple[Change, ...]) -> Judgement:
        made = self.run(*edits)
        judgement = self.assess(made, edits)
        if judgement.passes and not self.numerics and self.list_spoilt(made):
            return replace(judgement, passes=False)
        if not (judgement.passes and self.backward):
            return judgement
        reference = self.sound_reference(edits)
        if not gradients_finite(made, reference) or (self.numerics and not reference.gradients_finite):
            return _failed(made)
        tolerance = math.inf if self.step.mode.loss_scale in (None, 1.0) else GRADIENT_TOLERANCE
        return replace(judgement, passes=gradient_error(made, reference) <= tolerance)

    def list_spoilt(self, made: Result) -> list[str]:
        """Return the state that a run leaves non-finite, unless fp32 does so too with finite values, or for a mask."""
        sound = self.reference() if made.kept else made
        meant = {name for name in sound.kept if sound.values_finite or not made.kept.get(name)}
        return [name for name in made.kept if name not in meant]

    def assess(self, made: Result, edits: tuple[Change, ...]) -> Judgement:
        """Compare the output and the loss of a run that was made with `edits`.

        Raises:
            BudgetSpent: the budget is spent, and the reference to compare with was not run yet.
        """
        reference = self.sound_reference(edits)
        changed = self._changed_in_reference(edits)
        comparison = compare_runs(made, reference)
        shows = any(bool(torch.isfinite(value).any()) for value in reference.values.values())
        if not (comparison.finite and shows and (reference.values_finite or not changed)):
            return _failed(made)
        agrees, judges_edit = comparison.agrees(), self.numerics and bool(changed)
        if not agrees:
            judges_edit = judges_edit or self._tolerance > TOLERANCE
            exact = self.exact(*changed)
            comparison = compare_runs(made, reference, exact=exact)
            agrees = self._agrees(comparison, made, unsure=compare_runs(exact, reference))
        max_rel_err = comparison.accepted_rel_err(self._tolerance) if agrees else comparison.max_rel_err
        name = self.reference_name
        if judges_edit:
            # With the change, fp32 must give the same values wherever it was finite; elsewhere there is nothing to
            # agree with, except where float64 is finite and so has the true value.
            for other, sound in (("fp32", self.reference()), ("float64", self.exact())):
                changes = compare_runs(self.reference(*edits), sound)
                agrees = agrees and changes.agrees()
                if changes.max_rel_err > max_rel_err:
                    max_rel_err, name = changes.max_rel_err, other
        return Judgement(outcome=TrialOutcome(finite=True, max_rel_err=max_rel_err), passes=agrees, reference=name)

    def _agrees(self, comparison: Agreement, made: Result, *, unsure: Agreement) -> bool:
        """Return True if each value is close to the reference, or unchanged where the failure did not reach it."""
        tolerance = self._tolerance
        off = [name for name in comparison.values if not comparison.is_honest(name, unsure=unsure, tolerance=tolerance)]
        if not off or (before := self.run()).finite:  # if all was finite, the values themselves were the failure
            return not off
        moved, lost = compare_runs(made, before), compare_runs(before, self.reference())
        spared = (name for name in moved.values.keys() & lost.values if all_finite(before.values[name]))
        within = {name for name in spared if moved.is_honest(name) and lost.is_honest(name, tolerance=BF16_TOLERANCE)}
        return within.issuperset(off)

    @cached_property
    def _tolerance(self) -> float:
        """The tolerance: in bf16, twice the error of the samples that are finite without a change.

        Other samples may have a larger error than these. If all are finite, their error is the failure itself.
        """
        if self.as_saved:
            return BF16_TOLERANCE
        if self.step.low is not BF16 or (before := self.run()).finite:
            return TOLERANCE
        own_error = compare_runs(before, self.reference()).largest_finite_rel_err
        return min(max(TOLERANCE, 2 * own_error), BF16_TOLERANCE) if own_error else BF16_TOLERANCE

    def sound_reference(self, edits: tuple[Change, ...]) -> Result:
        """Return the reference for a run with `edits`: the unchanged step in fp32, or in float64 if fp32 fails.

        If float64 fails too, it is fp32 with the same edits.
        """
        changed = self._changed_in_reference(edits)
        return self.exact() if self.numerics and not changed else self.reference(*changed)

    @property
    def reference_name(self) -> str:
        """What the reference is, in words; "" if it is the very run that is compared."""
        if not self.numerics:
            return "fp32"
        return "float64" if self.exact().finite else self.changed_name

    @property
    def changed_name(self) -> str:
        """What the step in fp32 with the change is called as a reference; "" if that is the very run."""
        is_same = not self.step.mode.policy.ambient and self.step.low is FP32
        return "" if is_same else "fp32 with the change"

    def _changed_in_reference(self, edits: tuple[Change, ...]) -> tuple[Change, ...]:
        return edits if self.numerics and not self.exact().finite else ()

    def exact(self, *edits: Change) -> Result:
        """Return the step in float64: a fix need not agree with fp32 where fp32 itself is inexact."""
        return self.reference(*edits, UseFormat(format=FP64))

    def reference(self, *edits: Change) -> Result:
        """Return the step in fp32 with `edits`; it is run once."""
        key = _key(edits)
        if key not in self._references:
            self._references[key] = self._shared_reference(key) or self._execute(edits, REFERENCE)
        return self._references[key]

    @property
    def known_reference(self) -> Result | None:
        """The unchanged step in fp32, if it was run."""
        return self._references.get(frozenset())

    def _shared_reference(self, key: frozenset[Change]) -> Result | None:
        """Return the same reference with gradients, if known; the unchanged step's is run, since any fix needs it."""
        if self.backward or not self._is_own_step:
            return None
        if not key and not is_large(self.step.model):
            reference = self.with_gradients.reference()
            return reference if reference.ran else None
        return self.with_gradients._references.get(key)

    def run(self, *edits: Change) -> Result:
        """Run the step as it failed, with `edits`; without any it is run only once."""
        return self._execute(edits, None) if edits else self._unchanged

    @cached_property
    def _unchanged(self) -> Result:
        return self._execute((), None)

    def trace(self, *edits: Change) -> tuple[Trace, Trace] | None:
        """Trace the ops of forward and backward with `edits`, as the step failed and in fp32; None if it cannot run."""
        watch = Watch(stage="closer look", ops=True, backward=True)
        traces = []
        for policy in (None, REFERENCE):
            self.budget.spend()
            try:
                outcome = self.step.run(policy, watch, edits)
            except (LossError, ModelError, CannotRunError, RuntimeError, MemoryError) as error:
                self._end_if(out_of_memory=is_out_of_memory(error))
                return None
            self._end_if(out_of_memory=outcome.out_of_memory)
            traces.append(outcome.trace)
        return traces[0], traces[1]

    def _execute(self, edits: tuple[Change, ...], policy: Policy | None) -> Result:
        self.budget.spend()
        in_fp64 = any(isinstance(edit, UseFormat) and edit.format is FP64 for edit in _key(edits))
        if in_fp64 and sum(parameter.numel() for parameter in self.step.model.parameters()) > MOST_FP64_PARAMETERS:
            return keep(None)
        try:
            return self._with_meant(self._run(edits, policy), edits, policy)
        except LossError as error:
            # A loss that cannot be computed proves nothing about the change: it may not fit another batch or mode.
            is_own = self._is_own_step and not _selections(edits)
            # The reference raises too, if the change is not the reason why the loss cannot be computed: unchanged, the
            # NaN stops the loss before it needs what the dump lacks.
            if is_own and (not edits or (not self.reference().ran and is_wrong_call(error))):
                raise
            if self.step.loss is surrogate_loss and self.backward:
                self.backward = False  # the output depends on no trained weight
                return self._execute(edits, policy)
            return keep(None)
        except (ModelError, CannotRunError, RuntimeError, MemoryError) as error:
            self._end_if(out_of_memory=is_out_of_memory(error))
            return keep(None)  # a changed model may not run at all

    def _run(self, edits: tuple[Change, ...], policy: Policy | None) -> Result:
        seen: list[bool] = []

        def look(_: object, call: Invocation, proceed: Proceed) -> Any:
            made = proceed(call)
            if not seen and call.name not in UNFILLED and has_nonfinite(made, but_masks=True):
                seen.append(True)
            return made

        watch = Watch(
            stage=f"trial {self.budget.num_run}",
            statistics="none",
            backward=self.backward,
            keep=self.backward,
            worth_backward=partial(self._may_pass, edits),
            look=look if edits and policy is None else None,
        )
        # Warnings are ignored: they are about a batch or a format that the code never ran with.
        with warnings.catch_warnings(action="ignore"):
            outcome = self.step.run(policy, watch, edits)
        self._end_if(out_of_memory=outcome.out_of_memory)
        # The value of a surrogate loss is meaningless: it may cancel to a number without a correct digit.
        outcome = replace(outcome, loss=None) if self.step.loss is surrogate_loss else outcome
        is_clean = watch.look is not None and not seen and all(stats.finite for stats in outcome.trace.batch)
        return replace(keep(outcome), may_hide=not is_clean)

    def _with_meant(self, made: Result, edits: tuple[Change, ...], policy: Policy | None) -> Result:
        """Mark infinities as meant that the unchanged step has in fp32 too, if there is a known loss to judge them."""
        has_loss = self.step.loss is not None and self.step.loss is not surrogate_loss
        if made.values_finite or not has_loss or not (infinities := made.infinities):
            return made
        samples = _selections(edits)
        is_reference = policy is not None and len(samples) == len(_key(edits))
        return replace(made, meant=infinities if is_reference else self.reference(*samples).meant)

    def _may_pass(self, edits: tuple[Change, ...], output: Any, loss: torch.Tensor) -> bool:
        """Return False if output and loss are known to fail already, so that no backward pass is needed."""
        sound = self._references.get(frozenset())
        if self.numerics or not edits or sound is None or _selections(edits):
            return True
        return compare_runs(Result(values=values_of(output, loss), gradients={}, ran=True), sound).finite

    def _end_if(self, *, out_of_memory: bool) -> None:
        """Raise BudgetSpent if memory ran out: it says nothing about the change, and the next one would not fit."""
        if out_of_memory:
            self.budget.out_of_memory = True
            raise BudgetSpent


def _failed(made: Result) -> Judgement:
    return Judgement(outcome=TrialOutcome(finite=False, max_rel_err=None, ran=made.ran), passes=False)


def _selections(edits: Iterable[Change]) -> tuple[KeepSamples, ...]:
    """Return the edits that take samples out of the batch."""
    return tuple(edit for edit in _key(edits) if isinstance(edit, KeepSamples))


def _key(changes: Iterable[Change]) -> frozenset[Change]:
    """Return a key that is equal for sets of changes that do the same."""
    changes = tuple(changes)
    return frozenset((*flatten(changes), *(change for change in changes if isinstance(change, SourcePatch | Snippet))))


class BudgetSpent(Exception):  # noqa: N818  (an end, not an error)
    """No further trial may be run."""


class TrialBudget:
    """The budget for trying changes of one step: `max_trials` runs within `time_s` seconds from its creation.

    `out_of_memory`: a run did not fit into memory, so none was tried after it.
    """

    def __init__(self, max_trials: int | None = None, time_s: float | None = None) -> None:
        self.max_trials, self._time_s = max_trials, time_s
        self._started = time.monotonic()
        self.num_run = 0
        self.out_of_memory = False

    @property
    def is_spent(self) -> bool:
        """True if no further run may be made."""
        elapsed_s = time.monotonic() - self._started
        too_many = self.max_trials is not None and self.num_run >= self.max_trials
        return too_many or (self._time_s is not None and elapsed_s > self._time_s)

    def spend(self) -> None:
        """Count one more run; raise BudgetSpent if the budget is used up."""
        if self.is_spent:
            raise BudgetSpent
        self.num_run += 1
