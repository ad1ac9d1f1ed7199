"""matmul-overflow: the result of a matrix product does not fit its format.

What it is
    A linear layer, a convolution or an attention product whose exact result is finite but too large for fp16. Tensor
    cores sum in fp32, so the sum itself is right; it becomes Inf when it is rounded to fp16 at the end.
How nandoctor tells
    Recomputed in float64 from the same inputs, the result is finite and past the format's limit.
Why it happens
    Weights or activations grew, the sum has many terms, or attention scores are scaled after the product, not before.
Fix
    Scale before the product (`(q * scale) @ k.T`), normalise the input, or keep this module in fp32:
    `with torch.autocast("cuda", enabled=False): y = layer(x.float())`. bf16 has the range of fp32.
When it is wrong
    A product of hand-written parts (`(a * b).sum()`) is reported under the op that overflowed: the multiplication or
    the sum.
"""

from __future__ import annotations

from nandoctor.causes.base import Finding
from nandoctor.causes.sentences import argument, explain_overflow
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import PRODUCTS, is_factor
from nandoctor.text import number, plural

TITLE = "A matrix product is too large for its format"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    if finding.op.op not in PRODUCTS or not finding.overflowed:
        return None
    length = finding.analysis.length
    terms = () if length is None else (Evidence("length", length, f"each element sums {plural(length, 'term')}"),)
    sizes = tuple(
        Evidence(
            f"absmax_{operand.name}",
            operand.absmax,
            f"{argument(finding.op, operand.name)} reaches {number(operand.absmax)}",
        )
        for operand in finding.analysis.operands
        if is_factor(finding.op.op, operand.name)
    )
    return explain_overflow(finding, f"The {finding.op.op}", (*terms, *sizes))
