"""silent-overflow: an Inf disappears again on the way, and the finite output is wrong.

What it is
    An op turns the Inf back into a finite number: rsqrt(inf) and 1 / inf are 0, sigmoid and tanh of it are 1. No NaN is
    ever seen, GradScaler skips nothing, and the layer's output is zero or saturated.
How nandoctor tells
    An op overflows where fp32 does not, and the output is finite but far from fp32's.
Why it happens
    A norm written by hand in fp16: `x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)`.
Fix
    Compute that line in fp32 (`x.float().pow(2)`), as nn.RMSNorm and F.layer_norm do.
When it is wrong
    If the Inf is swallowed harmlessly (by a clamp, or a sigmoid that is saturated in fp32 too), the output stays close
    to fp32's, and nothing is reported.
"""

from __future__ import annotations

from nandoctor.causes.base import Finding
from nandoctor.causes.sentences import explain_overflow
from nandoctor.evidence.report import Account

TITLE = "A value overflowed, and the finite output is wrong"
PHASES = ("swallowed",)


def diagnose(finding: Finding) -> Account | None:
    if not finding.overflowed:
        return None
    then = "; a later operation hides the Inf, and the output is wrong"
    return explain_overflow(finding, f"The {finding.op.op}", then=then)
