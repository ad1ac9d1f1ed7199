"""log-of-zero: a logarithm meets an exact zero.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    log(0), log1p(-1), logit(0 or 1): the value is -inf or Inf, rightly so.
Evidence it needs
    Exact zeros in the argument (ones, for what is one short of it), and infinities in the output.
Why it happens
    A probability underflowed, or a sigmoid or softmax saturated: in fp16 sigmoid(x) is exactly 1 from x = 8.3 on.
Fix
    Work with logits: F.logsigmoid, F.log_softmax, F.binary_cross_entropy_with_logits; or clamp the probability to an
    eps that the format holds on both sides.
Known problems
    None.
"""

from __future__ import annotations

from nandoctor.evidence.report import Cause, Evidence
from nandoctor.rules.base import LOGARITHMS, Finding

CODE = "log-of-zero"
TITLE = "A logarithm of zero"


def diagnose(finding: Finding) -> Cause | None:
    """A logarithm whose argument holds its singular point."""
    op = finding.op.op
    operands = finding.exam.operands
    if op not in LOGARITHMS or finding.overflowed or not operands:
        return None
    argument = operands[-1]
    singular = -1.0 if "log1p" in op else 0.0
    meets = argument.min == singular if singular else argument.census.num_zero > 0
    if "logit" in op:
        meets = meets or argument.max == 1.0
    if not meets:
        return None
    where = "" if finding.twin is None or not finding.twin_is_finite else "; in fp32 the argument is not zero"
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{op} meets its singular point in {finding.exam.num_bad} of {finding.exam.numel} elements{where}.",
        evidence=(
            Evidence(
                name="num_zero",
                value=argument.census.num_zero,
                text=f"{argument.census.num_zero} of the argument's elements are exactly zero",
            ),
        ),
    )
