"""matmul-overflow: a product of matrices passes what its format can hold.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    A linear layer, a convolution or an attention product whose exact result is finite, and too large for fp16. Tensor
    cores sum in fp32, so the sum itself is right; it becomes Inf when it is rounded to fp16 at the end.
Evidence it needs
    The op computed again in float64 from the same inputs: finite there, and past the format's limit.
Why it happens
    Weights or activations grew, the sum has many terms, or attention scores are scaled after the product, not before.
Fix
    Scale before the product (`(q * scale) @ k.T`), normalise the input, or keep this module in fp32:
    `with torch.autocast("cuda", enabled=False): y = layer(x.float())`. bf16 has the range of fp32.
Known problems
    A product of hand-written parts (`(a * b).sum()`) is reported as what overflowed: the multiplication or the sum.
"""

from __future__ import annotations

from nandoctor.evidence.report import Cause, Evidence
from nandoctor.rules.base import PRODUCTS, Finding, number, overflow_evidence

CODE = "matmul-overflow"
TITLE = "A matrix product is too large for its format"


def diagnose(finding: Finding) -> Cause | None:
    """A product whose exact value is finite and does not fit."""
    if finding.op.op not in PRODUCTS or not finding.overflowed:
        return None
    length = finding.exam.length
    terms = () if length is None else (Evidence(name="length", value=length, text=f"each element sums {length} terms"),)
    sizes = tuple(
        Evidence(
            name=f"absmax_{operand.name}", value=operand.absmax, text=f"{operand.name} reaches {number(operand.absmax)}"
        )
        for operand in finding.exam.operands[:2]
    )
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"The {finding.op.op} gives {number(finding.exam.exact_absmax)}; {finding.format} holds at most "
        f"{number(finding.format.max)}, so the result is rounded to Inf.",
        evidence=(*overflow_evidence(finding), *terms, *sizes),
    )
