"""log-of-zero: a logarithm meets an exact zero.

In: a `Finding`. Out: a `Cause`, or None.

What it is
    log(0), log1p(-1), logit(0 or 1): the value is -inf or Inf, rightly so. Also a loss that asks for the logarithm of a
    probability that is zero by construction: of a masked class, or of a CTC target that cannot be aligned.
Evidence it needs
    Exact zeros in the argument (ones, for what is one short of it), and infinities in the output; or a written -inf
    that the loss is made of.
Why it happens
    A probability underflowed, or a sigmoid or softmax saturated: in fp16 sigmoid(x) is exactly 1 from x = 8.3 on. A
    label names a masked class, or label smoothing gives it weight.
Fix
    Work with logits: F.logsigmoid, F.log_softmax, F.binary_cross_entropy_with_logits; or clamp the probability to an
    eps that the format holds on both sides. Never mask what a label can name; F.ctc_loss(..., zero_infinity=True).
Known problems
    None.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import (
    CASTS,
    LOGARITHMS,
    MOVES,
    Candidate,
    Finding,
    ancestors,
    site_of,
    words,
    writes_infinity,
)
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.evidence.edits import StableLog
from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor

CODE = "log-of-zero"
TITLE = "A logarithm of zero"

_HAS_STABLE_LOG = words("softmax sigmoid")
_DEPTH = 6
_WRITTEN = "The -inf that is written here, a probability of zero, is what the loss is made of."
_HIDDEN_LOGARITHMS = {
    "logdet": "the determinant is zero",
    "linalg_slogdet": "the determinant is zero",
    "ctc_loss": "no alignment of a target fits the length of its input, so its probability is zero",
}


def diagnose(finding: Finding) -> Cause | None:
    """A logarithm whose argument is zero, in the open or by construction."""
    if writes_infinity(finding.op) and finding.analysis.kinds == ("-inf",):
        return _explain(finding.analysis.num_bad, _WRITTEN)
    if finding.op.op in _HIDDEN_LOGARITHMS and finding.analysis.kinds in (("+inf",), ("-inf",)):
        return _explain(finding.analysis.num_bad, f"{finding.op.op} is infinite: {_HIDDEN_LOGARITHMS[finding.op.op]}.")
    return _diagnose_logarithm(finding)


def diagnose_constant(tensor: OpTensor) -> Cause | None:
    """A -inf of the code's own, in a tensor that it made of numbers, and of which the loss is made."""
    counts = tensor.stats.counts if tensor.stats is not None else None
    return _explain(counts.num_neginf, _WRITTEN) if counts is not None and counts.kinds == ("-inf",) else None


def _explain(num_infinite: int, explanation: str) -> Cause:
    num_bad = Evidence(name="num_bad", value=num_infinite, text=f"{num_infinite} values are infinite")
    return Cause(code=CODE, title=TITLE, explanation=explanation, evidence=(num_bad,))


def _diagnose_logarithm(finding: Finding) -> Cause | None:
    op = finding.op.op
    operands = finding.analysis.operands
    if op not in LOGARITHMS or finding.overflowed or not operands:
        return None
    argument = operands[-1]
    singular = -1.0 if "log1p" in op else 0.0
    meets = argument.min == singular if singular else argument.counts.num_zero > 0
    if "logit" in op:
        meets = meets or argument.max == 1.0
    if not meets:
        return None
    where = "" if finding.twin is None or not finding.twin_is_finite else "; in fp32 the argument is not zero"
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"{op} meets its singular point in {finding.analysis.num_bad} of "
        f"{finding.analysis.numel} elements{where}.",
        evidence=(
            Evidence(
                name="num_zero",
                value=argument.counts.num_zero,
                text=f"{argument.counts.num_zero} of the argument's elements are exactly zero",
            ),
        ),
    )


def suggest(finding: Finding) -> Iterator[Candidate]:
    """The logarithm of a softmax or sigmoid in one function; else its argument clamped to where it is finite."""
    for source in _behind(finding):
        if source.op in _HAS_STABLE_LOG:
            complement = any(op.op in ("rsub", "sub") for op in _behind(finding) if op.order > source.order)
            yield (StableLog(log=site_of(finding.op), inner=site_of(source), complement=complement),)
            break
    yield clamp_into_domain(finding.op)


def _behind(finding: Finding) -> tuple[OpCall, ...]:
    """The ops that made the argument, seen through those that move it, and through 1 minus it."""
    if not finding.op.inputs:
        return ()
    return tuple(ancestors(finding.ops, finding.op.inputs[-1], _DEPTH, through=MOVES | CASTS | {"rsub", "sub"}))
