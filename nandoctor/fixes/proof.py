"""Verifies a change by running the very text that is printed, on the failing batch and on others near to it.

In: a change as it is written. Out: the judgement of its runs, and what each criterion said.

A change of the batch holds for that batch alone, so it is not tried on variations of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nandoctor.evidence.edits import Edit
from nandoctor.evidence.report import Check
from nandoctor.fixes.verify import Judgement, Trials
from nandoctor.fixes.writing import WrittenChange
from nandoctor.replaying.runner import Change


def verify_written(written: WrittenChange, edit: Edit, trials: Trials) -> tuple[Judgement, tuple[Check, ...]]:
    """Run the step with the written change, gradients included, then its variations; the first that fails ends it.

    Raises:
        BudgetSpent: nothing more may be run.
    """
    change = written.change if written.change is not None else edit
    proof = trials.with_gradients.judge(change)
    checks = [
        Check(name="output", status=_status(proof.outcome.finite), text=_say_output(proof)),
        Check(name="gradients", status=_status(proof.passes), text=_say_gradients(trials, proof)),
    ]
    if not proof.passes:
        return proof, tuple(checks)
    for check in _vary(change, trials) if written.kind != "data" else ():
        checks.append(check)
        if check.status == "failed":
            return Judgement(outcome=proof.outcome, passes=False), tuple(checks)
    if written.kind == "data":
        checks.append(Check(name="variations", status="not-checked", text="the change is of this batch alone"))
    return proof, tuple(checks)


def _vary(change: Change, trials: Trials) -> Iterator[Check]:
    for name, varied in trials.variations.items():
        # How far fp16 may be from fp32 is judged on the failing batch: elsewhere the step itself may magnify rounding.
        judgement = varied.judge(change)
        yield Check(name=name, status=_status(judgement.outcome.finite), text=_say_output(judgement))


def _status(passed: bool) -> Literal["passed", "failed"]:
    return "passed" if passed else "failed"


def _say_output(judgement: Judgement) -> str:
    error = judgement.outcome.max_rel_err
    if not judgement.outcome.finite or error is None:
        return "non-finite"
    return f"finite, {100 * error:.2g} % off fp32"


def _say_gradients(trials: Trials, proof: Judgement) -> str:
    of = "of the loss" if trials.step.loss is not None else "of a surrogate loss, for none is known"
    return f"{'finite' if proof.passes else 'not all finite, or far from fp32'}, {of}"
