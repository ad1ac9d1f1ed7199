"""log-of-zero: the argument of a logarithm is exactly zero.

What it is
    log(0), log1p(-1), logit(0 or 1): the value is correctly -inf or Inf. Also a loss that takes the logarithm of a
    probability that is zero by construction, such as that of a masked class or of a CTC target that cannot be aligned.
How nandoctor tells
    The argument is exactly zero (-1 for log1p, 0 or 1 for logit), and the output is infinite; or the code writes a -inf
    from which the loss is computed.
Why it happens
    A probability underflowed, or a sigmoid or softmax saturated: in fp16 sigmoid(x) is exactly 1 from x = 8.32 on. Or a
    label names a masked class, or label smoothing gives that class weight.
Fix
    Work with logits (F.logsigmoid, F.log_softmax, F.binary_cross_entropy_with_logits), or clamp the probability to an
    eps that the format can hold on both sides. Never mask a class that a label can name. For CTC, use
    `F.ctc_loss(..., zero_infinity=True)`. Keep a matrix whose determinant is taken invertible: by its triangular
    factors, or with a multiple of the identity.
When it is wrong
    If a small constant was meant to prevent the zero and fp16 rounded it away, the report names eps-underflow instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding, OutsideTensor, outside_domain, writes_infinity
from nandoctor.causes.candidates import STABLE_FORM, off_edge_candidates, stable_forms
from nandoctor.causes.invalid_domain import clamp_into_domain
from nandoctor.causes.sentences import operand, subject
from nandoctor.changes.constant import SetFlag
from nandoctor.changes.places import maker_of, site_of
from nandoctor.evidence.report import Account, Evidence
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, DOMAINS, HIDDEN_LOGARITHMS, LOGARITHMS, MOVES, SUBTRACTIONS
from nandoctor.text import are, constant, file_line, part_of, plural

TITLE = "A logarithm of zero"
PHASES = ("forward", "constant")

_DEPTH = 6
_PROBABILITIES = {"softmax": "F.log_softmax", "sigmoid": "F.logsigmoid", "exp": "torch.logsumexp"}
"""What is taken of the logits instead; of an exponential only if it is summed up."""


def diagnose(finding: Finding | OutsideTensor) -> Account | None:
    if isinstance(finding, OutsideTensor):
        counts = finding.stats.counts
        return _explain_written(counts.num_neginf) if counts is not None and counts.kinds == ("-inf",) else None
    if writes_infinity(finding.op) and finding.analysis.kinds == ("-inf",):
        return _explain_written(finding.analysis.num_bad)
    if finding.op.op in HIDDEN_LOGARITHMS and finding.analysis.kinds in (("+inf",), ("-inf",)):
        why = f"is infinite: {HIDDEN_LOGARITHMS[finding.op.op]}"
        return _explain(finding.analysis.num_bad, f"{subject(finding.op)} {why}", f"{finding.op.op} {why}.")
    return _diagnose_logarithm(finding)


def _explain_written(num_infinite: int) -> Account:
    told = "The code writes -inf here, the logarithm of a probability of 0, and the loss is computed from it."
    return _explain(num_infinite, "The loss is computed from a -Inf that the code writes: the logarithm of 0", told)


def _explain(num_infinite: int, headline: str, explanation: str) -> Account:
    num_bad = Evidence("num_bad", num_infinite, plural(num_infinite, "infinite value"))
    return Account(headline=headline, explanation=explanation, evidence=(num_bad,))


def _diagnose_logarithm(finding: Finding) -> Account | None:
    op = finding.op.op
    if op not in LOGARITHMS or finding.overflowed or outside_domain(finding) is not None:
        return None
    domain = DOMAINS[op]
    argument = finding.operand(domain.argument)
    if argument is None:
        return None
    meets_low = argument.counts.num_zero > 0 if domain.low == 0 else argument.min == domain.low
    if not meets_low and argument.max != domain.high:
        return None
    edge = domain.low if meets_low else domain.high
    zeros = argument.counts.num_zero
    text = f"the argument is exactly {constant(edge)}"
    if edge == 0:
        text = f"{plural(zeros, 'element')} of the argument {are(zeros)} exactly zero"
    nonfinite = part_of(finding.analysis.num_bad, finding.analysis.numel, "value")
    in_fp32 = "; in fp32 it does not" if finding.reference_is_finite else ""
    stable = tuple(_tell_stable(finding, domain.argument))
    return Account(
        headline=f"{operand(finding.op, domain.argument) or f'The argument of {op}'} is exactly {constant(edge)} in "
        f"{nonfinite}, and {op}({constant(edge)}) is infinite",
        explanation=f"The argument of {op} reaches exactly {constant(edge)}, which makes {nonfinite} "
        f"infinite{in_fp32}.{''.join(f' Better: {item.text}.' for item in stable)}",
        evidence=(Evidence("num_zero" if edge == 0 else "argument", zeros if edge == 0 else edge, text), *stable),
    )


def _tell_stable(finding: Finding, argument: str) -> Iterator[Evidence]:
    """Yield advice to fuse a probability or a sum of powers with its logarithm: no diff joins two functions."""
    taken = finding.op.find_input(argument)
    made_by, is_rest = _probability_behind(finding, taken)
    logits = made_by.inputs[0].stats if made_by is not None else None
    if made_by is None or finding.op.op != "log" or logits is None or not logits.finite:  # a mask's -Inf would remain
        return
    line = f" ({file_line(made_by.source.file, made_by.source.line)})" if made_by.source else ""
    form = f"{_PROBABILITIES[made_by.op]} of their negative" if is_rest else f"{_PROBABILITIES[made_by.op]} of them"
    text = f"pass on the logits in place of {subject(made_by)}{line}, and take {form} here: exact, gradient included"
    yield Evidence(STABLE_FORM, _PROBABILITIES[made_by.op], text)


def _probability_behind(finding: Finding, tensor: OpTensor | None) -> tuple[OpCall | None, bool]:
    """Return the softmax, sigmoid or sum of powers that made a tensor, and True if it is 1 minus that."""
    is_rest = is_sum = False
    for _ in range(_DEPTH):
        op = maker_of(tensor, finding.ops)
        if op is None or op.op in _PROBABILITIES:
            is_known = op is not None and is_sum == (op.op == "exp") and (op.op == "sigmoid" or not is_rest)
            return (op, is_rest) if is_known else (None, False)
        is_one_less = op.op in SUBTRACTIONS and len(op.inputs) == 1 and 1.0 in dict(op.scalars).values()
        if not is_one_less and op.op not in MOVES | CASTS | {"sum"}:
            break
        is_sum = is_sum or op.op == "sum"
        is_rest, tensor = is_rest != is_one_less, op.inputs[0]
    return None, False


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Rewrite the logarithm without the probability before it; else clamp its argument to where it is finite."""
    yield from stable_forms(finding.op, finding.ops)
    if finding.op.op == "ctc_loss":
        yield (SetFlag(site=site_of(finding.op), argument="zero_infinity"),)
    yield clamp_into_domain(finding.op)
    yield from off_edge_candidates(finding.op, finding.ops)
