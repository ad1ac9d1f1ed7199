"""poisoned-weights: a weight is non-finite, or too large to be a weight.

What it is
    One parameter holds a NaN, an infinity or an implausible magnitude (1e30), and so does everything computed from it.
    The failing step is only where it showed.
How nandoctor tells
    A parameter among the inputs of the op, or in the state of the module, is non-finite or exceeds 65504 in magnitude.
Why it happens
    An earlier optimizer step had non-finite gradients (without GradScaler's check), memory was never initialised
    (`torch.empty`), or the checkpoint is broken.
Fix
    Go back to a checkpoint from before, and look for the step that broke it; or initialise the parameter. If the weight
    is finite and too large for fp16, its module can run in fp32, or the model in bf16; what made it so large goes on.
When it is wrong
    This file does not tell which step broke the weight.
"""

from __future__ import annotations

from nandoctor.causes.base import OutsideTensor, outside_evidence
from nandoctor.causes.sentences import how_nonfinite
from nandoctor.evidence.report import Account
from nandoctor.text import code, number

TITLE = "The weights already hold NaN, Inf or implausibly large values"
PHASES = ("weight",)
ABSURD = 65504.0
"""Trained weights stay below 1e3; values above 65504 overflow when autocast casts them to fp16."""


def diagnose(finding: OutsideTensor) -> Account | None:
    stats, low, absmax = finding.stats, finding.low, finding.stats.absmax or 0.0
    if stats.finite and absmax <= ABSURD:
        return None
    how, headline, then = "holds non-finite values", f"{how_nonfinite(stats)} before the forward starts", ""
    if stats.finite:
        if low is not None and not low.holds(absmax):
            then = f"; {low} holds at most {number(low.max)}, so its copy in {low} is Inf"
        how = f"reaches {number(absmax)}"
        headline = f"{how}{then}"
    return Account(
        headline=f"The weight {code(finding.name)} {headline}",
        explanation=f"The weight {finding.name} {how} before the forward starts{then}.",
        evidence=outside_evidence("weight", finding, how),
    )
