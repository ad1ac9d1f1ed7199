"""Brings the failing step back: the call, mode and seed under which the replay agrees with the saved output.

In: a `Preparation`. Out: `Replayed`: the step as it failed, with the run that shows it, graded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from nandoctor.dumps.array_roles import is_loss
from nandoctor.errors import ModelError
from nandoctor.evidence.formats import BF16, FP16, FP32
from nandoctor.evidence.report import ReplayAttempt, Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.replaying.grading import grade
from nandoctor.replaying.runner import CLOSELY, MODULES_ONLY, FailingStep
from nandoctor.replaying.setup import Preparation

CLOSE_ENOUGH = 0.02
"""A replay that differs from the saved output by no more than this share of its largest magnitude is the same run:
other hardware sums in another order, and fp16 rounds at every layer."""

CLEARLY = 4.0
"""So many times nearer is another precision, and not the luck of one rounding."""

_GRADE_RANK = {"exact": 0, "same-mask": 1, "elsewhere": 2, "no-reference": 3, "finite": 3}
_HALF = (FP16, BF16)
_WRONG_CALL = (TypeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The failing step in one call, mode and seed, the trace of its run, and how well that agrees with the saved one.

    `random` tells whether the run drew random numbers, `any_random` whether one of those that were tried did.
    """

    step: FailingStep
    trace: Trace
    random: bool
    reproduction: Reproduction
    any_random: bool = False

    @property
    def name(self) -> str:
        """What was chosen: mode and seed."""
        drawn = "the saved random state" if self.step.seed is None else f"seed {self.step.seed}"
        return f"{'train' if self.step.training else 'eval'} mode, {drawn}"

    @property
    def accepted(self) -> bool:
        """Whether this is the failing step again, so that no other setting need be tried."""
        if self.reproduction.grade == "no-reference":
            return not self.trace.finite
        return _agrees(self.reproduction)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sorts the better replay first."""
        return _GRADE_RANK[self.reproduction.grade], self.trace.finite, self.reproduction.max_rel_err or 0.0


def reproduce(preparation: Preparation) -> Replayed:
    """Replay until the failing step is shown again, else as near to it as can be; all settings tried are named.

    Raises:
        ModelError: the model cannot be called with the batch.
    """
    best = _search(preparation.steps, preparation)
    for policy in preparation.policies[1:]:
        if best.reproduction.grade in ("exact", "no-reference"):
            break
        steps = tuple(replace(step, policy=policy) for step in (best.step, *preparation.steps))
        with suppress(ModelError):  # without autocast the model may not run at all
            other = _search(steps, preparation)
            best = other if _agrees_better(other, best) else best
    return best


def _search(steps: tuple[FailingStep, ...], preparation: Preparation) -> Replayed:
    """The best replay under one policy."""
    tried: list[Replayed] = []
    calls = steps
    for training, seed in _settings(preparation):
        if seed != preparation.seeds[0] and not any(replayed.random for replayed in tried):
            break
        tried.append(_replay([replace(step, training=training, seed=seed) for step in calls], preparation))
        calls = (tried[0].step,)
        if tried[-1].accepted:
            break
    best = min(tried, key=lambda replayed: replayed.rank)
    others = [replayed for replayed in tried if replayed is not best]
    attempts = tuple(
        ReplayAttempt(training=made.step.training, seed=made.step.seed, grade=made.reproduction.grade)
        for made in (*others, best)
    )
    any_random = any(replayed.random for replayed in tried)
    return replace(best, reproduction=replace(best.reproduction, attempts=attempts), any_random=any_random)


def _agrees_better(other: Replayed, best: Replayed) -> bool:
    """Tell whether a replay in another precision is so much nearer to the saved output that it was that."""
    ranks = [_GRADE_RANK[replayed.reproduction.grade] for replayed in (other, best)]
    errors = [replayed.reproduction.max_rel_err or 0.0 for replayed in (other, best)]
    return ranks[0] < ranks[1] or (ranks[0] == ranks[1] and CLEARLY * errors[0] < errors[1])


def _settings(preparation: Preparation) -> Iterator[tuple[bool, int | None]]:
    """The modes with the first seed, then the other seeds in the first mode."""
    first, *more = preparation.seeds
    yield from ((training, first) for training in preparation.modes)
    yield from ((preparation.modes[0], seed) for seed in more)


def _replay(steps: list[FailingStep], preparation: Preparation) -> Replayed:
    """Replay the first of `steps`, or the next where the model rejects the arguments themselves."""
    step, *others = steps
    try:
        outcome = step.run(watch=replace(CLOSELY, stage="replay") if preparation.saved_nonfinite else MODULES_ONLY)
    except ModelError as error:
        if others and isinstance(error.__cause__, _WRONG_CALL):
            with suppress(ModelError):  # where no call fits, the error of the likeliest is the one to show
                return _replay(others, preparation)
        raise
    if not step.policy.ambient and step.low in _HALF and not _shows_half(outcome.trace):
        return _replay([replace(step, policy=replace(step.policy, format=FP32))], preparation)
    output = outcome.output
    saved = preparation.outputs
    if saved.graded is not None and outcome.loss is not None and is_loss(saved.graded[0]):
        output = {saved.graded[0]: outcome.loss}
    grades = [grade(saved.graded, output, saved.field), *(grade(named, output) for named in saved.perhaps)]
    reproduction = next(filter(_agrees, grades), grades[0])
    if preparation.other_weights and reproduction.grade == "exact":
        reproduction = replace(reproduction, grade="same-mask")  # an output that is all NaN is no witness
    return Replayed(step=step, trace=outcome.trace, random=outcome.random, reproduction=reproduction)


def _agrees(reproduction: Reproduction) -> bool:
    close = (reproduction.max_rel_err or 0.0) <= CLOSE_ENOUGH
    return reproduction.grade == "exact" or (reproduction.grade == "same-mask" and close)


def _shows_half(trace: Trace) -> bool:
    """Tell whether anything in half precision was seen, so that its limits matter."""
    seen = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs, *call.state))
    return any(stats.dtype in _HALF for stats in (*trace.batch, *trace.output, *seen))
