"""poisoned-target: the target of the loss is non-finite.

What it is
    A NaN or an infinity in the mask, the label or the regression target: the model's output is fine, its loss is not.
How nandoctor tells
    An array of the batch that only the loss reads, or that the model passes to a torch loss as its target, is
    non-finite.
Why it happens
    A missing annotation, the logarithm of a zero label, a division in the code that makes the target.
Fix
    Exclude such samples from the loss by selection (`loss[mask].mean()`), or fix the annotation.
When it is wrong
    Any array that only the loss reads is called a target, sample weights too.
"""

from __future__ import annotations

from nandoctor.causes.base import OutsideTensor, outside_evidence
from nandoctor.causes.sentences import how_nonfinite
from nandoctor.evidence.report import Account
from nandoctor.text import code

TITLE = "The target already holds NaN or Inf"
PHASES = ("target",)


def diagnose(finding: OutsideTensor) -> Account:
    return Account(
        headline=f"The target {code(finding.name)} {how_nonfinite(finding.stats)}",
        explanation=f"The batch's {finding.name}, which the loss reads, holds non-finite values.",
        evidence=outside_evidence("array", finding),
    )
