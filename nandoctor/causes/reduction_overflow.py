"""reduction-overflow: the result of a sum over many elements does not fit its format.

What it is
    A sum, norm, variance or running total whose exact value is finite but past the format's limit.
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

from nandoctor.causes.base import Finding
from nandoctor.causes.sentences import explain_overflow
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import REDUCTIONS, SERIAL_PRODUCTS
from nandoctor.text import plural

TITLE = "A sum over many elements is too large for its format"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    is_past = finding.op.op in SERIAL_PRODUCTS and finding.is_past_float64  # finite terms are so only in a long product
    if finding.op.op not in REDUCTIONS or not (finding.overflowed or is_past):
        return None
    length = finding.analysis.length
    terms = () if length is None else (Evidence("length", length, f"each element sums {plural(length, 'term')}"),)
    over = f" over {plural(length, 'element')}" if length else ""
    return explain_overflow(finding, f"The {finding.op.op}{over}", terms)
