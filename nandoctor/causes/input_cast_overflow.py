"""input-cast-overflow: a value that fits fp32 overflows when it is cast to fp16.

What it is
    The Inf shows in the first layer, but its input was too large already: autocast casts the inputs of every product to
    fp16, and 1e5 becomes Inf in that cast. A hand-written `.half()` does the same.
How nandoctor tells
    An input of a product or a cast is finite in its own format and past the limit of the lower one.
Why it happens
    The batch was not normalised (raw counts, time stamps, currency), or an op that autocast runs in fp32 made a large
    value.
Fix
    If the batch is too large, normalise the data (divide by 255, standardise, take logarithms). If the value was
    computed, bound it where it is made (`logvar.clamp(max=10)` before an exp), leave out a cast of your own, or run the
    layer outside autocast.
When it is wrong
    If fp16 can hold the values but not their product, the report names matmul-overflow instead.
"""

from __future__ import annotations

from nandoctor.causes.base import Finding
from nandoctor.causes.sentences import operand, subject
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import Operand
from nandoctor.ops import CASTS, MOVES, PRODUCTS
from nandoctor.text import code, excess, number

TITLE = "The input is too large for the cast to the lower precision"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    if finding.op.op not in PRODUCTS and finding.op.op not in CASTS:
        return None
    target = finding.format
    for taken in finding.analysis.operands:
        if taken.dtype.max > target.max and taken.absmax is not None and not target.holds(taken.absmax):
            return _explain(finding, taken, taken.absmax)
    return None


def _explain(finding: Finding, taken: Operand, absmax: float) -> Account:
    target, tensor = finding.format, finding.op.find_input(taken.name)
    assert tensor is not None
    first = [op for op in [*finding.sources(tensor)][-1:] if op.op in MOVES | CASTS]
    moved = (tensor, *(given for op in first for given in op.inputs[:1]))  # an array is at most moved or cast
    is_from_batch = any(given.origin == "batch" for given in moved)
    name = code(tensor.path) if is_from_batch and tensor.path else operand(finding.op, taken.name)
    what = f"the batch's {tensor.path or taken.name}" if is_from_batch else name or "its input"
    is_cast = finding.op.op in CASTS
    how = "it is cast to" if is_cast else "autocast casts it to"
    reached, limit = number(absmax, unlike=target.max), number(target.max)
    beyond = f"{excess(absmax, target.max)} what {target} can hold"
    return Account(
        headline=f"{name or f'The input of {subject(finding.op)}'} reaches {reached}; {how} {target}, which stops at "
        f"{limit}",
        explanation=f"{'The line' if is_cast else finding.op.op} casts {what} to {target}, which holds at most "
        f"{limit}; the value {reached} becomes Inf{'' if is_cast else ' before anything is computed'}.",
        evidence=(
            Evidence("input_absmax", absmax, f"{name or 'the input'} reaches {reached} in {taken.dtype}, {beyond}"),
        ),
    )
