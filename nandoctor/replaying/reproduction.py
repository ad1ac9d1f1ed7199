"""Brings the failing step back: the call, mode and seed under which the replay agrees with the saved output.

In: a `Preparation`. Out: `Replayed`: the step as it failed, with the run that shows it, graded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from nandoctor.errors import ModelError
from nandoctor.evidence.report import ReplayAttempt, Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.replaying.grading import grade
from nandoctor.replaying.runner import CLOSELY, MODULES_ONLY, FailingStep
from nandoctor.replaying.setup import Preparation

CLOSE_ENOUGH = 0.02
"""A replay that differs from the saved output by no more than this share of its largest magnitude is the same run:
other hardware sums in another order, and fp16 rounds at every layer."""

_GRADE_RANK = {"exact": 0, "same-mask": 1, "elsewhere": 2, "no-reference": 3, "finite": 3}
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
        close = (self.reproduction.max_rel_err or 0.0) <= CLOSE_ENOUGH
        return self.reproduction.grade == "exact" or (self.reproduction.grade == "same-mask" and close)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sorts the better replay first."""
        return _GRADE_RANK[self.reproduction.grade], self.trace.finite, self.reproduction.max_rel_err or 0.0


def reproduce(preparation: Preparation) -> Replayed:
    """Replay until the failing step is shown again, else as near to it as can be; all settings tried are named.

    Raises:
        ModelError: the model cannot be called with the batch.
    """
    tried: list[Replayed] = []
    calls = preparation.steps
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
    reproduction = grade(preparation.saved, outcome.output, preparation.output_field)
    return Replayed(step=step, trace=outcome.trace, random=outcome.random, reproduction=reproduction)
