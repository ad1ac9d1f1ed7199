"""silent-overflow: a value overflowed and was swallowed, and the finite output is wrong.

What it is
    An Inf that disappears again: rsqrt(inf) is 0, 1 / inf is 0, a softmax gives all its weight to it. No NaN is ever
    seen, GradScaler skips nothing, and the layer's output is zero or one-hot.
How nandoctor tells
    An op that overflows where fp32 does not, on no way to a non-finite output, and an output far from fp32's.
Why it happens
    A norm written by hand in fp16: `x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)`.
Fix
    Compute that line in fp32: `x.float().pow(2)`; nn.RMSNorm and F.layer_norm do.
When it is wrong
    An Inf that is swallowed harmlessly (a clamp, a softmax that is saturated in fp32 too) leaves the output near to
    fp32's and is not reported.
"""

from __future__ import annotations

from nandoctor.causes.base import Finding, overflow_evidence, past_limit
from nandoctor.causes.sentences import past, subject
from nandoctor.evidence.report import Cause

CODE = "silent-overflow"
TITLE = "A value overflowed, and the finite output is wrong"
PHASES = ("swallowed",)


def diagnose(finding: Finding) -> Cause | None:
    """An overflow that leaves a finite output."""
    if not finding.overflowed:
        return None
    return Cause(
        code=CODE,
        title=TITLE,
        headline=f"{subject(finding.op)} {past(finding.analysis.exact_absmax, finding.format)}; "
        "a later operation hides the Inf, and the output is wrong",
        explanation=f"{finding.op.op} gives {past_limit(finding.analysis.exact_absmax, finding.format)}. A later op "
        "hides the Inf, so the output is finite and far from fp32's.",
        evidence=overflow_evidence(finding),
    )
