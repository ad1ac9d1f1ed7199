"""reduction-overflow: the result of a sum over many elements does not fit its format.

What it is
    A sum, norm, variance or running total whose exact value is finite but past the format's limit. A product with a
    matrix of ones counts too: it is a sum written as a matmul.
How nandoctor tells
    Recomputed in float64, the result is finite and past the format's limit; the evidence gives the number of terms. The
    product of many numbers (`prod`) counts even if it is infinite in float64 too.
Why it happens
    Each term fits, but there are many; or the terms are squares, as in a variance. Autocast runs `sum` and `norm` in
    fp32, but not `var`, pooling that is written as a matmul, `einsum`, or linear attention that sums over all
    positions.
Fix
    Take the mean first, divide before summing, or compute the reduction in fp32: `x.float().var(dim)`.
When it is wrong
    A sum past the limit of fp32 is reported as well: there a mean helps, and more precision does not.
"""

from __future__ import annotations

from nandoctor.causes.base import Finding, factors
from nandoctor.causes.sentences import explain_overflow
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import PRODUCTS, REDUCTIONS, SERIAL_PRODUCTS
from nandoctor.text import plural

TITLE = "A sum over many elements is too large for its format"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    """Explain a reduction whose exact value is finite and does not fit."""
    summing = finding.op.op in REDUCTIONS or (finding.op.op in PRODUCTS and _sums_with_ones(finding))
    # Finite terms exceed float64 only in a long product.
    if not summing or not (finding.overflowed or (finding.op.op in SERIAL_PRODUCTS and finding.is_past_float64)):
        return None
    length = finding.analysis.length
    terms = () if length is None else (Evidence("length", length, f"each element sums {plural(length, 'term')}"),)
    over = f" over {plural(length, 'element')}" if length else ""
    return explain_overflow(finding, f"The {finding.op.op}{over}", terms)


def _sums_with_ones(finding: Finding) -> bool:
    """Return True if one factor is the same number everywhere, which makes a product of several terms a sum.

    With a weight among the inputs, the other factor may be constant by chance, such as a blank image.
    """
    if finding.analysis.length in (None, 1) or any(tensor.origin == "weight" for tensor in finding.op.inputs):
        return False
    return any(operand.min == operand.max and operand.min for operand in factors(finding) if operand.shape)
