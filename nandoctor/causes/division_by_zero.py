"""division-by-zero: a denominator is exactly zero.

What it is
    x / 0, 0 / 0, 1 / sqrt(0), 0 to a negative power, weight_norm of a row of zeros, or a norm layer whose eps is zero.
How nandoctor tells
    The denominator has exact zeros; or a normalisation of finite values is non-finite, in float64 as well.
Why it happens
    A count, a norm or a variance is zero for one sample: an empty mask, a constant tile, padding.
Fix
    Keep what is divided by, or raised to a negative power, off 0: a count by `count.clamp(min=1)`, a size by
    `size.clamp(min=1e-6)` or an eps that the format can hold.
When it is wrong
    If a small constant was meant to prevent the zero and fp16 rounded it away, the report names eps-underflow instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding, find_zeros_behind, is_whole_power, outside_domain
from nandoctor.causes.candidates import OFF_ZERO, guard_candidate, off_zero_candidate, stable_forms, stable_variances
from nandoctor.causes.sentences import argument, subject
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.log_space import is_nonnegative
from nandoctor.changes.places import singular_inputs, site_of
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, DIVISIONS, DOMAINS, NORMALISATIONS
from nandoctor.text import are, code, number, plural

TITLE = "A division by zero"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    if finding.overflowed or outside_domain(finding) is not None:
        return None
    if finding.op.op in NORMALISATIONS:
        return None if finding.had_inf_input else _explain_norm(finding)
    divisor = _divisor(finding.op)
    denominator = None if divisor is None else finding.operand(divisor.name)
    if denominator is not None and denominator.counts.num_zero:
        return _explain(finding, denominator.name, denominator.counts.num_zero)
    if finding.op.op in DIVISIONS and ("other", 0.0) in finding.op.scalars:
        return _explain(finding, "other", 1)
    return None


def _explain(finding: Finding, name: str, zeros: int) -> Account:
    divisor = argument(finding.op, name)
    reference = finding.reference_op.find_input(name) if finding.reference_op is not None else None
    stats = None if reference is None else reference.stats
    # That in fp32 if rounding made it 0.
    smallest = stats.min if stats is not None and stats.finite and (stats.min or 0.0) > 0 else None
    in_fp32 = f" (at least {number(smallest)} in fp32)" if smallest is not None else ""
    then = f"; in fp32 none is, and the smallest is {number(smallest)}" if smallest is not None else ""
    found = f"{plural(zeros, 'element')} of {divisor} {are(zeros)} 0{then}"
    taken = finding.op.find_input(name)
    behind = None if taken is None else find_zeros_behind(taken, finding.ops)
    why = f", because {code(behind.path)} is 0 throughout" if behind is not None and behind is not taken else ""
    return Account(
        headline=f"{subject(finding.op)} divides by zero: {divisor} is 0 in {plural(zeros, 'element')}{in_fp32}{why}",
        explanation=f"{finding.op.op} divides by exact zeros: {found}{why}.",
        evidence=(Evidence("num_zero", zeros, f"{divisor} is exactly 0 in {plural(zeros, 'element')}"),),
    )


def _explain_norm(finding: Finding) -> Account:
    """Explain a singular normalisation of finite values: their spread is zero, and no eps prevents the division."""
    num_bad = finding.analysis.num_bad
    return Account(
        headline=f"{subject(finding.op)} divides by a spread of exactly 0",
        explanation=f"{finding.op.op} divides by a spread that is exactly zero, and its eps does not prevent it.",
        evidence=(Evidence("num_bad", num_bad, f"{plural(num_bad, 'element')} without a finite value"),),
    )


def _divisor(op: OpCall) -> OpTensor | None:
    is_negative_power = op.op == "pow" and any(value < 0 for _, value in op.scalars)
    divides = op.op in DIVISIONS or op.op == "_weight_norm" or is_negative_power
    return next(iter(singular_inputs(op)), None) if divides else None


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Rewrite the quotient without exponentials that round to 0; else keep the denominator off zero."""
    yield from stable_forms(finding.op, finding.ops)
    yield from stable_variances(finding.op, finding.ops)
    divisor = _divisor(finding.op)
    if divisor is None and finding.op.op in DIVISIONS and ("other", 0.0) in finding.op.scalars:
        yield (SetArgument(site=site_of(finding.op), argument="other", was=0.0, value=1.0),)
    if divisor is not None:
        counts = (1.0,) if _is_count(finding, divisor) else ()
        of_root = finding.op.op in DOMAINS and not is_whole_power(finding.op)
        signed = not (of_root or is_nonnegative(divisor, finding.ops))
        clamps = off_zero_candidate(finding.op, divisor.name, (*counts, *OFF_ZERO), signed=signed)
        guard = guard_candidate(finding.op)
        if finding.op.op == "pow" or not guard or "nan" not in finding.analysis.kinds:
            yield (*clamps[: len(counts)], *guard, *clamps[len(counts) :])  # a clamp would make up a large number
        else:  # 0 / 0 may tend to one; a bound above the smallest would replace divisors that other batches have
            yield (*clamps[: len(counts) + 1], *guard)
        makers = [*finding.sources(divisor)]
        moved = {maker.order for maker in makers}
        takers = [op for op in finding.ops if any(taken.producer in moved for taken in op.inputs)]
        if len(takers) > len(makers):  # as a scale that is divided by, and multiplied with again
            # A cancelling numerator, as in (1 - exp(-k)) / k, needs a larger bound.
            yield off_zero_candidate(makers[-1], "", signed=signed)


def _is_count(finding: Finding, tensor: OpTensor) -> bool:
    """Return True if the divisor is an integer, or was one before a cast: if it is not 0, it is at least 1."""
    casts = (op for op in finding.sources(tensor) if op.op in CASTS)
    return any(taken.stats is None for taken in (tensor, *(taken for op in casts for taken in op.inputs)))
