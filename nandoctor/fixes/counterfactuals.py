"""The failing step under other settings: precision, mode, samples, loss scale, seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nandoctor.evidence.edits import KeepSamples, SetLossScale, UseFormat
from nandoctor.evidence.formats import BF16, FP16, FP32, FP64
from nandoctor.evidence.report import Counterfactual, StepSetting
from nandoctor.fixes.verify import Trials
from nandoctor.replaying.runner import FailingStep
from nandoctor.text import MAX_SAMPLES_LISTED, samples_text
from nandoctor.torch_compat import is_running_norm

NUM_SEEDS = 3
_SEEDS_ALIKE = 2
"""So many other seeds with which the step fails as well show that it does not depend on what is drawn; where it fails
without dropout as well, one does."""


def vary_settings(trials: Trials, guilty: tuple[int, ...], *, random: bool) -> Iterator[Counterfactual]:
    """Run the step with one setting changed after the other, as long as the budget of the trials lasts.

    `guilty` are the samples to blame, none where they are not known; `random` tells whether the step draws random
    numbers, so that other seeds are worth a run.
    """
    step = trials.step
    # Where fp32 is finite float64 says no more, and takes many times as long.
    for number_format in (FP16, BF16, FP32, *((FP64,) if trials.numerics else ())):
        if (outcome := trials.look(UseFormat(format=number_format))) is not None:
            yield Counterfactual(group="precision", setting=StepSetting(dtype=number_format), outcome=outcome)
    enough = _SEEDS_ALIKE
    for flag in (True, False):
        if (outcome := trials.varied(training=flag, seed=step.seed).look()) is not None:
            enough = enough if flag or outcome.finite else 1
            yield Counterfactual(group="mode", setting=StepSetting(training=flag), outcome=outcome)
    for setting, samples in _selections(guilty, step.num_samples):
        if (outcome := trials.look(KeepSamples(samples=samples))) is not None:
            yield Counterfactual(group="samples", setting=setting, outcome=outcome)
    for scale in _scales(step.loss_factor) if step.loss is not None else ():
        if (outcome := trials.look(SetLossScale(value=scale))) is not None:
            yield Counterfactual(group="loss-scale", setting=StepSetting(loss_scale=scale), outcome=outcome)
    first, num_failed = (step.seed or 0) + 1, 0
    for seed in range(first, first + NUM_SEEDS) if random else ():
        if num_failed == enough:
            return
        if (outcome := trials.varied(training=step.training, seed=seed).look()) is not None:
            num_failed += not outcome.finite
            yield Counterfactual(group="seed", setting=StepSetting(seed=seed), outcome=outcome)


def _selections(guilty: tuple[int, ...], num_samples: int | None) -> Iterator[tuple[StepSetting, tuple[int, ...]]]:
    """The samples to blame alone, and all others, each as a setting and as the samples that are kept."""
    if not guilty or num_samples is None or len(guilty) >= num_samples:
        return
    yield StepSetting(only=guilty), guilty
    if len(guilty) < MAX_SAMPLES_LISTED:  # as many as that may not be all
        yield StepSetting(without=guilty), tuple(i for i in range(num_samples) if i not in guilty)


def _scales(loss_scale: float) -> tuple[float, ...]:
    """The scale of the step, two that GradScaler would come to, and none."""
    return tuple(dict.fromkeys((loss_scale, max(loss_scale / 16, 1.0), max(loss_scale / 256, 1.0), 1.0)))


def describe_coupling(found: Iterable[Counterfactual], step: FailingStep) -> tuple[str, ...]:
    """Tell where the samples fail only together, so that neither those to blame nor the others show it alone."""
    samples = [trial for trial in found if trial.group == "samples"]
    if len(samples) < 2 or not all(trial.outcome.finite for trial in samples):
        return ()
    blamed = next(trial.setting.only for trial in samples if trial.setting.only)
    norms = [name for name, module in step.model.named_modules() if is_running_norm(module) and step.training]
    mixer = f" {norms[0]} computes its statistics over the whole batch." if norms else ""
    return (f"The batch fails only as a whole: it is finite with {samples_text(blamed)} alone and without.{mixer}",)
