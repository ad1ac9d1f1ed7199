"""elementwise-overflow: the result of an addition, a multiplication or another elementwise op does not fit its format.

What it is
    Both operands fit, but their sum, product or quotient does not: a residual stream, a gate, a squared activation,
    dropout that scales by 1 / (1 - p), or a division by a tiny number.
How nandoctor tells
    Recomputed in float64 from the same inputs, the result is finite and past the format's limit. Sums and products of
    finite numbers count even if they are infinite in float64 too.
Why it happens
    Autocast leaves add, mul and div in the precision of their inputs, so in fp16 the limit is 65504.
Fix
    Compute this line in fp32 (`x.float() * y.float()`; for `x * x`, `x.pow(2)`, which autocast runs in fp32), normalise
    the stream, or scale the branch.
When it is wrong
    It is the last overflow to be checked: matrix products, reductions and exponentials have causes of their own.
"""

from __future__ import annotations

import math

from nandoctor.causes.base import Finding
from nandoctor.causes.sentences import argument, explain_overflow
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import PRODUCTS, REDUCTIONS, WITHOUT_POLES
from nandoctor.text import constant, number

TITLE = "An elementwise result is too large for its format"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    if finding.op.op in PRODUCTS or finding.op.op in REDUCTIONS:
        return None
    has_no_pole = finding.op.op in WITHOUT_POLES and all(math.isfinite(value) for _, value in finding.op.scalars)
    if not (finding.overflowed or (has_no_pole and finding.is_past_float64)):
        return None
    there = {operand.name: operand.at_worst for operand in finding.analysis.operands if operand.at_worst is not None}
    evidence = tuple(
        Evidence(f"worst_{name}", value, f"{argument(finding.op, name)} is {number(value)} there")
        for name, value in there.items()
    )
    made_of = " and ".join(map(number, there.values()))
    constants = ", ".join(f"{name} {constant(value)}" for name, value in finding.op.scalars)
    made_by = f"{finding.op.op} of {made_of or 'its inputs'}{f' ({constants})' if constants else ''}"
    return explain_overflow(finding, made_by, evidence)
