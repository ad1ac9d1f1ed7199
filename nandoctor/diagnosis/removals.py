"""Finds the op that removed a value whose derivative is infinite: by what values and gradients do, not by op names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nandoctor.evidence.trace import OpCall
from nandoctor.ops import MOVES

_ROUNDING = 2.0**-7
"""A gradient that is passed on may be rounded to bf16 on the way."""

_Samples = tuple[NDArray[np.float32], NDArray[np.float32]]
BackwardOps = Mapping[int | None, Sequence[OpCall]]
"""The ops of the backward pass by the order of their forward op."""


def by_forward(backward: Iterable[OpCall]) -> BackwardOps:
    """Return backward ops by the order of their forward op."""
    found: dict[int | None, list[OpCall]] = {}
    for op in backward:
        found.setdefault(op.forward, []).append(op)
    return found


def find_removal(op: OpCall, ops: Sequence[OpCall], backward: BackwardOps) -> tuple[OpCall | None, bool]:
    """Return the op of the forward that removed the value where the backward `op` turns a zero gradient into NaN.

    The second is True if it selects: it passes on each gradient that it gets as it is, or as 0.

    An Inf or NaN in the forward was removed by the first op that makes a finite result of it; a finite value by the
    first op whose gradient is 0 there although the one that it got is not. None if the gradient that comes back is not
    0, or becomes 0 in another way, such as the derivative of a square at 0.
    """
    operands = op.analysis.operands if op.analysis is not None else ()
    # The incoming gradient has to be exactly 0 at the worst element; in doubt, anywhere.
    meets_zero = any(it.at_worst == 0 or (it.at_worst is None and it.counts.num_zero) for it in operands)
    if op.forward is None or not meets_zero:
        return None, False
    forward, place = ops[op.forward], _find_place(op)
    is_hidden, carriers = not forward.outputs_finite, {forward.order}
    for later in ops[forward.order + 1 :]:
        taken = [tensor for tensor in later.inputs if tensor.producer in carriers]
        if is_hidden:
            taken = [tensor for tensor in taken if tensor in later.nonfinite_inputs]
        has_own = later.order in backward  # the derivative of x + 1 is no op
        if not taken or (not has_own and (later.outputs_finite or not is_hidden)):
            continue
        if is_hidden and later.outputs_finite:
            return later, _selects(backward.get(later.order, ()))
        if not is_hidden and _zeroes(backward[later.order], place):
            return (later, True) if _selects(backward[later.order]) else (None, False)
        carriers.add(later.order)
    return None, False


def _selects(nodes: Sequence[OpCall]) -> bool:
    """Return True if these backward ops of one op pass on each gradient that they get as it is, or as 0."""
    return any(
        _passes_on(node, given, made) for node in nodes for given, made in _pairs(node) if np.isfinite(made).all()
    )


def _passes_on(node: OpCall, given: NDArray[np.float32], made: NDArray[np.float32]) -> bool:
    kept = made != 0
    if not kept.any():  # a product with 0 gives that too
        return False
    if given.shape == made.shape:
        return bool(np.isclose(made[kept], given[kept], rtol=_ROUNDING, atol=0).all())
    return node.op in MOVES or bool(np.isin(made[kept], given).all())


def _find_place(op: OpCall) -> tuple[int, int] | None:
    """Return a sampled element where `op` makes a zero gradient non-finite, with the number of samples; else None."""
    for given, made in _pairs(op):
        if given.shape == made.shape:
            places = np.flatnonzero(~np.isfinite(made) & (given == 0))
            if len(places):
                return int(places[0]), len(made)
    return None


def _zeroes(nodes: Sequence[OpCall], place: tuple[int, int] | None) -> bool:
    """Return True if backward ops of one op turn a gradient into 0: at the sampled `place` if that can be told."""
    for node in nodes:
        for given, made in _pairs(node):
            if place is not None and len(given) == len(made) == place[1]:
                if given[place[0]] != 0 and made[place[0]] == 0:
                    return True
            elif (made == 0).sum() > (given == 0).sum() and (made != 0).any():
                return True
    return False


def _pairs(node: OpCall) -> Iterator[_Samples]:
    """Yield the sampled incoming and outgoing gradients of a backward op."""
    taken = [tensor.stats.sample for tensor in node.inputs if tensor.stats is not None]
    for given, made in product(taken, [stats.sample for stats in node.outputs]):
        if given is not None and made is not None and len(given) and len(made):
            yield given, made
