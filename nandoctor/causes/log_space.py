"""Stable rewrites: of logarithms and quotients without the exponential before them, and of variances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.causes.base import Candidate
from nandoctor.changes.largest_exponent import subtractions
from nandoctor.changes.log_space import StableLog
from nandoctor.changes.places import ancestors, descendants, maker_of, site_of
from nandoctor.changes.variance import StableVariance
from nandoctor.evidence.edits import SingleEdit, Together
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, HAS_STABLE_LOGARITHM, MOVES, SUBTRACTIONS

STABLE_FORM = "stable_form"
"""The name of the evidence that says what to write by hand, where no diff joins the code of two functions."""
_STEPS, _FAR = 8, 40
_KEEPS_SIGN = frozenset({"mul", "div", "reciprocal", "add", "sum", "mean", "cumsum", "prod", "sqrt", "square"})
_SEEN_THROUGH = MOVES | CASTS | SUBTRACTIONS | _KEEPS_SIGN | {"neg", "masked_fill", "masked_select", "where", "pow"}
_LOGARITHMS = frozenset({"log", "log1p"})
_QUOTIENTS = frozenset({"div", "reciprocal"})


def stable_forms(op: OpCall, ops: Sequence[OpCall]) -> Iterator[Candidate]:
    """Yield stable rewrites of logarithms before an op, of the first logarithm and quotient from it on, of exponents.

    A hand-written softplus, for one, rounds to 0 too early, and a division by it or its logarithm is then infinite.
    """
    made_of = [op, *(source for tensor in op.inputs for source in _behind(ops, tensor))]
    for inner in (source for source in made_of[1:] if source.op in _LOGARITHMS and source.inputs):
        if any(source.op in HAS_STABLE_LOGARITHM for source in _behind(ops, inner.inputs[0])):
            yield (StableLog(site=site_of(inner)),)
    if not any(source.op in HAS_STABLE_LOGARITHM for source in made_of):
        return
    later = {taker.order for taker in descendants(ops, op.order, _STEPS)}
    after, found = [op, *(ops[order] for order in sorted(later))], list[SingleEdit]()
    for names in (_LOGARITHMS, _QUOTIENTS):
        for made in (made for made in after if made.op in names and made.inputs):
            taken = made.inputs[-1] if made.op == "div" else made.inputs[0]
            if any(source.op in HAS_STABLE_LOGARITHM for source in _behind(ops, taken)):
                found.append(StableLog(site=site_of(made)))
                yield (found[-1],)
                break
    if len(found) > 1:  # of the same exponential, as in log(s) + x / s
        yield (Together(edits=tuple(found)),)
    for power in (made for made in made_of if made.op == "exp"):
        if any(taker.op in _QUOTIENTS for taker in descendants(ops, power.order, _FAR)):
            yield tuple(subtractions(power, ops))


def stable_variances(op: OpCall, ops: Sequence[OpCall]) -> Iterator[Candidate]:
    """Yield stable forms of the differences before an op that subtract something from a mean, as of squares."""
    for made in (source for tensor in op.inputs for source in _behind(ops, tensor)):
        first = maker_of(made.inputs[0], ops) if made.op == "sub" else None
        if first is not None and first.op == "mean":
            yield (StableVariance(site=site_of(made)),)


def _behind(ops: Sequence[OpCall], tensor: OpTensor) -> Iterator[OpCall]:
    return ancestors(ops, tensor, _STEPS, through=_SEEN_THROUGH)
