"""poisoned-weights: a weight is non-finite, or too large to be a weight.

What it is
    A NaN, an infinity or an implausible magnitude (1e30) in one parameter: so is everything computed from it, and the
    failing step is only where it showed.
How nandoctor tells
    A parameter that is non-finite, or past 65504 in magnitude, among the inputs of the op or the state of the module.
Why it happens
    An earlier optimizer step with non-finite gradients (without GradScaler's check), memory that was never initialised
    (`torch.empty`), a broken checkpoint.
Fix
    Go back to a checkpoint from before, and look for the step that broke it; initialise the parameter. With one that is
    finite and too large for fp16, its module runs in fp32, and the model in bf16; what made it so large goes on.
When it is wrong
    Which step broke it cannot be told from this file.
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
    """A weight that is non-finite before anything runs, or absurdly large."""
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
