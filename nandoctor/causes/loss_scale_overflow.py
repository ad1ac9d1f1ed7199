"""loss-scale-overflow: the loss scale was too large for this step, and nothing else is wrong.

What it is
    GradScaler starts at 65536 and halves the scale whenever a gradient overflows: a few skipped steps at the start of
    training are by design.
How nandoctor tells
    The gradients are non-finite at the dump's loss scale and finite at scale 1.
Why it happens
    GradScaler starts high and halves the scale until the gradients are finite.
Fix
    None is needed. To skip fewer steps, start at a scale at which the gradients are finite
    (`GradScaler(init_scale=...)`).
When it is wrong
    If steps are skipped at every scale and without end, the cause is another: gradient-overflow or a non-finite loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nandoctor.causes.base import Candidate, GradientFinding, gradient_evidence
from nandoctor.causes.sentences import subject
from nandoctor.changes.setting import SetLossScale
from nandoctor.evidence.report import Account, Evidence
from nandoctor.text import number

TITLE = "The loss scale was too large"
PHASES = ("backward",)


def diagnose(finding: GradientFinding) -> Account | None:
    if finding.excess_scale is None:
        return None
    scale, limit = number(finding.excess_scale), number(finding.low.max)
    exceeds = f"At a loss scale of {scale} the gradient through {subject(finding.op)} exceeds"
    return Account(
        headline=f"{exceeds} {limit}, the largest number of {finding.low}",
        explanation=f"{exceeds} what {finding.low} holds ({limit}); at scale 1 every gradient is finite, so GradScaler "
        "halves the scale until they are.",
        evidence=(
            Evidence("loss_scale", finding.excess_scale, f"the loss scale was {scale}"),
            *gradient_evidence(finding),
        ),
    )


def suggest(finding: GradientFinding) -> Iterator[Candidate]:
    """Halve the loss scale, as GradScaler will, until the gradients are finite: at 1 they are."""
    assert finding.excess_scale is not None
    halvings = range(1, math.floor(math.log2(finding.excess_scale)) + 1)
    yield tuple(SetLossScale(value=finding.excess_scale / 2**count) for count in halvings)
