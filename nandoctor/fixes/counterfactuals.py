"""The failing step under other circumstances: precision, mode, samples, loss scale, seed.

In: what is to be varied, and the trials of the step in each mode and with each seed. Out: `Counterfactual`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nandoctor.evidence.edits import KeepSamples, SetLossScale, UseFormat
from nandoctor.evidence.formats import BF16, FP16, FP32, FP64
from nandoctor.evidence.report import Counterfactual
from nandoctor.fixes.verify import Trials

TrialsAt = Callable[[bool, int | None], Trials]
"""The trials of the step in train mode or not, and with a seed (None: the saved random state)."""

NUM_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What can be varied about a step.

    `guilty` are the samples to blame, of `num_samples`; None where they are not known or not samples of the batch.
    `loss_scale` is None without a backward pass; `random` tells whether the step draws random numbers.
    """

    training: bool
    seed: int | None
    guilty: tuple[int, ...]
    num_samples: int | None
    loss_scale: float | None
    random: bool


def compare_circumstances(circumstances: Circumstances, trials_at: TrialsAt) -> Iterator[Counterfactual]:
    """One line for each circumstance, as long as the budget of the trials lasts.

    Raises:
        BudgetSpent: nothing more may be run.
    """
    training, seed = circumstances.training, circumstances.seed
    step = trials_at(training, seed)
    for number_format in (FP16, BF16, FP32, FP64):
        if (outcome := step.look(UseFormat(format=number_format))) is not None:
            yield Counterfactual(group="precision", setting=number_format.label, outcome=outcome)
    for flag in (True, False):
        if (outcome := trials_at(flag, seed).look()) is not None:
            yield Counterfactual(group="mode", setting="train" if flag else "eval", outcome=outcome)
    for name, samples in _selections(circumstances):
        if (outcome := step.look(KeepSamples(samples=samples))) is not None:
            yield Counterfactual(group="samples", setting=name, outcome=outcome)
    for scale in _scales(circumstances.loss_scale):
        if (outcome := step.look(SetLossScale(value=scale))) is not None:
            yield Counterfactual(group="loss-scale", setting=f"{scale:g}", outcome=outcome)
    for other in range((seed or 0) + 1, (seed or 0) + 1 + NUM_SEEDS) if circumstances.random else ():
        if (outcome := trials_at(training, other).look()) is not None:
            yield Counterfactual(group="seed", setting=str(other), outcome=outcome)


def _selections(circumstances: Circumstances) -> Iterator[tuple[str, tuple[int, ...]]]:
    guilty, num_samples = circumstances.guilty, circumstances.num_samples
    if not guilty or num_samples is None or len(guilty) >= num_samples:
        return
    named = ", ".join(map(str, guilty[:4])) + (" ..." if len(guilty) > 4 else "")
    plural = "s" if len(guilty) > 1 else ""
    yield f"sample{plural} {named} alone", guilty
    yield f"without sample{plural} {named}", tuple(i for i in range(num_samples) if i not in guilty)


def _scales(loss_scale: float | None) -> tuple[float, ...]:
    """The scale of the step, two that GradScaler would come to, and none."""
    if loss_scale is None:
        return ()
    return tuple(dict.fromkeys((loss_scale, max(loss_scale / 16, 1.0), max(loss_scale / 256, 1.0), 1.0)))
