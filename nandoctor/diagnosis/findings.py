"""What all runs of a failing step show together, before anything is changed to fix it."""

from __future__ import annotations

from dataclasses import dataclass

from nandoctor.diagnosis.conclusion import Conclusion
from nandoctor.diagnosis.coverage import Gap
from nandoctor.evidence.optimizer import OptimizerSlot
from nandoctor.evidence.trace import OpCall, TensorStats, Trace
from nandoctor.evidence.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The step under autocast and in fp32, and what is concluded.

    `ops` are the operations seen, those of the backward pass's run where there was one; `bad_gradients` the
    parameters' non-finite gradients; `slots` the state of the optimizer. `random` tells whether the step draws random
    numbers. `gaps` are what could not be looked at.
    """

    trace: Trace
    reference: Trace
    verdict: Verdict
    conclusion: Conclusion
    random: bool = False
    ops: tuple[OpCall, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    slots: tuple[OptimizerSlot, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
