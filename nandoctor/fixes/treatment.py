"""Treats a failing step: every trial is a run of the very attempt that was diagnosed.

In: the attempt, its diagnosis and a budget. Out: `Remedies`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from torch import nn

from nandoctor.autocast.policy import REFERENCE
from nandoctor.diagnosis.diagnosis import Conclusion
from nandoctor.errors import ModelError
from nandoctor.evidence.edits import Edit, UseFormat
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.optimizer import OptimizerSlot
from nandoctor.evidence.report import Verdict
from nandoctor.evidence.trace import Trace
from nandoctor.fixes.search import Patient, Remedies, prescribe
from nandoctor.fixes.verify import Budget, Precision, Purse, Trials
from nandoctor.replaying.interventions import batch_size, flatten
from nandoctor.replaying.reproduction import Attempt, Replay
from nandoctor.replaying.runner import Outcome, Watch

MOST_FP64_PARAMETERS = 250_000_000
"""2 GB of weights in float64, on top of those that are there."""


def treat(
    replay: Replay,
    attempt: Attempt,
    trace: Trace,
    reference: Trace,
    conclusion: Conclusion,
    verdict: Verdict,
    *,
    slots: tuple[OptimizerSlot, ...],
    loss_scale: float,
    budget: Budget,
) -> Remedies:
    """Changes that cure the step, and the step under other circumstances; nothing for a step that did not fail."""
    if verdict in ("healthy", "not-reproduced"):
        return Remedies()
    setup = attempt.setup
    purse = Purse(budget)
    watch = Watch(measures=False, backward=setup.loss is not None, keep=setup.loss is not None, loss_scale=loss_scale)

    @cache
    def trials_at(training: bool, seed: int | None) -> Trials:
        def run_step(edits: tuple[Edit, ...], precision: Precision) -> Outcome | None:
            policy = REFERENCE if precision == "fp32" else replay.policy
            stage = f"trial {purse.num_run} {'in fp32' if precision == 'fp32' else 'under autocast'}"
            if _is_too_large(setup.model, edits):
                return None
            # An edited model may not run at all, or not fit into memory.
            with suppress(ModelError, RuntimeError, MemoryError):
                return replay.run(stage, setup, policy, training=training, seed=seed, watch=watch, edits=edits)
            return None

        numerics = verdict not in ("precision", "silent", "loss-scale")
        return Trials(run_step, purse, numerics=numerics, strict_gradients=loss_scale != 1)

    patient = Patient(
        model=setup.model,
        trace=trace,
        reference=reference,
        conclusion=conclusion,
        verdict=verdict,
        low=replay.low,
        num_samples=batch_size(setup.batch, setup.used),
        has_loss=setup.loss is not None,
        loss_scale=loss_scale if setup.loss is not None else None,
        random=attempt.outcome.random,
        slots=slots,
    )
    return prescribe(patient, trials_at)


def _is_too_large(model: nn.Module, edits: tuple[Edit, ...]) -> bool:
    """Whether a float64 run was asked for that may not fit beside the model."""
    in_fp64 = any(isinstance(edit, UseFormat) and edit.format is FP64 for edit in flatten(edits))
    return in_fp64 and sum(parameter.numel() for parameter in model.parameters()) > MOST_FP64_PARAMETERS
