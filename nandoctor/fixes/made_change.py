"""Verifies a change that was made already, the code of a step as it was loaded, by the checks of a printed fix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nandoctor.evidence.edits import Edit, SetLossScale, SourcePatch, Together
from nandoctor.evidence.report import Check, TrialOutcome
from nandoctor.fixes.agreement import Result
from nandoctor.fixes.budget import TrialBudget
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.verify import Trials
from nandoctor.fixes.writing import WrittenChange
from nandoctor.replaying.runner import FailingStep

_AS_IT_IS = Together(edits=())


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeChange:
    """What the checks of a change say; `beside_unchanged`: its reference was the step without it, not with it."""

    outcome: TrialOutcome
    checks: tuple[Check, ...]
    beside_unchanged: bool


def verify_made(
    step: FailingStep, *, made: SourcePatch | None, random: bool, loss_scale: float | None = None
) -> MadeChange:
    """Run the step, gradients included, and its variations, beside the code that it had before.

    `made` is the patch that the loaded code has already, None where it is not known; `loss_scale` one that was set
    since. Without the patch, or where the step does not fail when it is taken back, the reference is fp32 of the code
    as it is.

    Raises:
        BudgetSpent: memory ran out.
    """
    failing = _failing_without(step, made) if made is not None else None
    edit: Edit = _AS_IT_IS if loss_scale is None else SetLossScale(value=loss_scale)
    trials = failing or Trials(step, TrialBudget(), numerics=False)
    guilty = _nonfinite_samples(trials.with_gradients.run(), step.num_samples) if failing is not None else ()
    verifier = Verifier(trials, guilty=guilty, random=random)
    change = WrittenChange(kind="source", title="", text="", change=made if failing is not None else None)
    judgement, checks = verifier.verify(change, edit)
    return MadeChange(outcome=judgement.outcome, checks=checks, beside_unchanged=failing is not None)


def _failing_without(step: FailingStep, made: SourcePatch) -> Trials | None:
    """The trials of the step with the patch taken back; None where that cannot be run, or does not fail."""
    before = replace(step, applied=made)
    trials = Trials(before, TrialBudget(), numerics=False).with_gradients
    failed = trials.run()
    if not failed.ran or failed.finite:
        return None
    in_fp32 = not _same_finite(trials.reference(), trials.reference(made))
    return Trials(before, TrialBudget(), numerics=in_fp32)


def _same_finite(one: Result, other: Result) -> bool:
    """Tell whether two runs are finite in the same places, gradients included: what is infinite in both is meant."""
    pairs = [(one.values[name], other.values.get(name)) for name in one.values]
    same = all(b is not None and a.shape == b.shape and torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs)
    return one.ran and other.ran and same and one.gradients_finite == other.gradients_finite


def _nonfinite_samples(failed: Result, num_samples: int | None) -> tuple[int, ...]:
    outputs = [values for values in failed.values.values() if values.dim() and len(values) == num_samples]
    return tuple(
        sample for sample in range(num_samples or 0) if not all(bool(rows[sample].isfinite().all()) for rows in outputs)
    )
