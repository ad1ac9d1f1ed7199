"""The changes that several causes suggest: clamps, guards and masks of an argument, and stable rewrites."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from nandoctor.causes.base import Candidate, is_whole_power
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.largest_exponent import subtractions
from nandoctor.changes.log_space import StableLog
from nandoctor.changes.mask_first import TRIANGLES, MaskFirst
from nandoctor.changes.places import ancestors, descendants, maker_of, site_of
from nandoctor.changes.variance import StableVariance
from nandoctor.evidence.edits import SingleEdit, Together
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import (
    CASTS,
    DIVISIONS,
    DOMAINS,
    FILLS,
    HAS_STABLE_LOGARITHM,
    MOVES,
    NORMALISATIONS,
    PRODUCTS,
    REDUCTIONS,
    SINGULAR_INPUTS,
    SOFTMAXES,
    SUBTRACTIONS,
)

OFF_ZERO = (1e-12, 1e-6, 1e-4)
"""Distances to keep from zero."""
_EDGES = {-1.0, 0.0, 1.0}
"""Where the domains of functions end, as a rule."""
_MIX_ELEMENTS = frozenset(PRODUCTS) | REDUCTIONS | NORMALISATIONS | SOFTMAXES | MOVES
_NEAREST, _DEPTH = 2, 16
STABLE_FORM = "stable_form"
"""The name of the evidence that says what to write by hand, where no diff joins the code of two functions."""
_STEPS, _FAR = 8, 40
_KEEPS_SIGN = frozenset({"mul", "div", "reciprocal", "add", "sum", "mean", "cumsum", "prod", "sqrt", "square"})
_SEEN_THROUGH = MOVES | CASTS | SUBTRACTIONS | _KEEPS_SIGN | {"neg", "masked_fill", "masked_select", "where", "pow"}
_LOGARITHMS = frozenset({"log", "log1p"})
_QUOTIENTS = frozenset({"div", "reciprocal"})


def clamp_candidate(op: OpCall, argument: str, bounds: Sequence[tuple[float | None, float | None]]) -> Candidate:
    """Return changes that clamp the argument of an op to each of the `bounds`, (low, high)."""
    return tuple(ClampArgument(site=site_of(op), argument=argument, low=low, high=high) for low, high in bounds)


def finite_candidate(op: OpCall, tensor: OpTensor) -> Candidate:
    """Return changes that give an op finite numbers for the infinities of an argument.

    The first, the largest of its format, changes nothing else, but may be too large for what follows.
    """
    assert tensor.stats is not None
    return clamp_candidate(op, tensor.name, [(-limit, limit) for limit in (tensor.stats.dtype.max, 1e4)])


def off_zero_candidate(op: OpCall, argument: str, smallest: Sequence[float] = OFF_ZERO, *, signed: bool) -> Candidate:
    """Return changes that keep an argument of an op, "" for its result, each of these distances from zero.

    It keeps its sign if `signed`.
    """
    return tuple(ClampArgument(site=site_of(op), argument=argument, low=low, keeps_sign=signed) for low in smallest)


def off_edge_candidates(op: OpCall, ops: Sequence[OpCall]) -> Iterator[Candidate]:
    """Yield clamps of what the user's code passes on to an op of torch's own Python where it is exactly 0, 1 or -1.

    No text of the user's has the op, but one has made what it is singular at. The nearest two are tried.
    """
    if op.inside is None:
        return
    behind = chain.from_iterable(ancestors(ops, tensor, _DEPTH) for tensor in op.inputs)
    ours = (maker for maker in behind if maker.inside is None and maker.op not in MOVES | CASTS | FILLS)
    at_edge = (it for it in ours if it.outputs and {it.outputs[0].min, it.outputs[0].max} & _EDGES)
    for maker in islice(at_edge, _NEAREST):
        low, high = maker.outputs[0].min, maker.outputs[0].max
        margins = OFF_ZERO if low == 0 and high not in _EDGES else OFF_ZERO[1:]  # beside 1 fp32 loses 1e-12
        ends = [(low + it if low in _EDGES else None, high - it if high in _EDGES else None) for it in margins]
        yield clamp_candidate(maker, "", ends)


def guard_candidate(op: OpCall, *, edge: float | None = None) -> tuple[GuardArgument, ...]:
    """Return changes that give 0 where the op or its derivative is infinite; empty if it is not known where.

    If `edge` is given, only that edge of the domain is guarded: acos is 0 at 1, and pi at -1.
    """
    domain = DOMAINS.get(op.op)
    if is_whole_power(op):
        return (GuardArgument(site=site_of(op), argument="self", safe=1.0),)
    if domain is not None:
        ends = (domain.low, domain.high)
        low, high = (end if math.isfinite(end) and edge in (None, end) else None for end in ends)
        return (GuardArgument(site=site_of(op), argument=domain.argument, low=low, high=high, safe=domain.inside),)
    names = SINGULAR_INPUTS.get(op.op, ()) if op.op in DIVISIONS else ()
    return tuple(GuardArgument(site=site_of(op), argument=name, safe=1.0) for name in names[:1])


def mask_candidates(op: OpCall, argument: str, ops: Sequence[OpCall], *, safe: float = 0.0) -> Iterator[Candidate]:
    """Yield changes that give an op a `safe` argument where a later op masks what is made of its result.

    Nothing else reads it up to there, and each element is made of one.
    """
    made, site = op, site_of(op)
    forward = [it for it in ops if it.phase != "backward" and it.forward is None]
    while not (made.op in _MIX_ELEMENTS or made.outputs[0].shape != op.outputs[0].shape):
        order = made.order
        readers = [it for it in forward if any(tensor.producer == order for tensor in it.inputs)]
        if len(readers) != 1:
            return
        made = readers[0]
        taken = [tensor for tensor in made.inputs if tensor.producer == order]
        # A mask are flags, or numbers from 0 to 1.
        has_flags = any(it.stats is None or (it.stats.min, it.stats.max) == (0, 1) for it in made.inputs)
        has_mask = made.op in ("where", "masked_fill", "mul") and has_flags
        if len(taken) == 1 and (has_mask or (made.op in TRIANGLES and not safe)):
            masked = taken[0].name
            yield (MaskFirst(site=site, argument=argument, safe=safe, mask=site_of(made), masked=masked),)


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
