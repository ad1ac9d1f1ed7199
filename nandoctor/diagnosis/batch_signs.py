"""What ops show of a dimension of the batch: whether it counts samples, or steps in time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import NORMALISATIONS, PRODUCTS, REDUCTIONS, RESHAPES, SOFTMAXES, SUMS, dims_of

Sign = Literal["samples", "time"]

_BATCHED_PRODUCTS = frozenset({"bmm", "baddbmm", "matmul", "scaled_dot_product_attention"})
_PICKS = frozenset({"select", "slice", "narrow", "unbind", "index_select", "flip", "roll"})
_ALONG = REDUCTIONS | SOFTMAXES | _PICKS | {"amax", "amin", "max", "min", "median", "argmax", "sort", "topk"}
_FIRST_BY_DEFAULT = frozenset({"slice", "unbind", "select"})
_COPYING = frozenset({"expand", "expand_as", "repeat", "repeat_interleave"})


def is_state(op: OpCall, state: Collection[int]) -> bool:
    """Tell whether weights and buffers alone went into the op, `state` being the orders of earlier such ops."""
    floats = [tensor for tensor in op.inputs if tensor.stats is not None]
    return (
        bool(floats)
        and op.op not in _COPYING
        and all(tensor.origin in ("weight", "buffer") or tensor.producer in state for tensor in floats)
    )


def read_signs(op: OpCall, followed: Sequence[tuple[OpTensor, int]], state: Collection[int]) -> Iterator[Sign]:
    """What the op shows of the dimension that is followed, whose place stands beside each tensor."""
    for tensor, where in followed:
        rank = len(_shape(tensor))
        if rank < 3:
            continue  # sequences have features as well
        if op.op in _ALONG and rank == 3:
            yield from _of_dims(op, tensor, where)
        elif op.op in PRODUCTS or op.op in NORMALISATIONS:
            yield from _of_layer(op, tensor, where, num_factors=len(followed))
        elif op.op in RESHAPES and where == 0 and rank == 3 and op.outputs[0].shape == _joined(_shape(tensor)):
            yield "samples"
        elif op.op in SUMS | {"mul"}:
            yield from _of_state(op, state, where, rank)


def _of_dims(op: OpCall, tensor: OpTensor, where: int) -> Iterator[Sign]:
    """Read from a choice or a sum along dimensions: that of features shows nothing, nor do all but that of features."""
    dims = set(dims_of(op, 3) or ((0,) if op.op in _FIRST_BY_DEFAULT else ()))
    is_whole = op.op in ("slice", "narrow") and op.outputs[0].shape == _shape(tensor)
    if not dims or is_whole or dims >= {0, 1}:
        return
    if where in dims:
        yield "time"
    elif dims & {0, 1}:
        yield "samples"


def _of_layer(op: OpCall, tensor: OpTensor, where: int, *, num_factors: int) -> Iterator[Sign]:
    """Read from a product or a norm: samples lead, and matrices, time or channels come after them."""
    rank, named = len(_shape(tensor)), {item.name: item for item in op.inputs}
    state = _shape(named.get("hx[0]", named.get("hx")))
    if op.op in _BATCHED_PRODUCTS and num_factors > 1:
        yield "samples" if where < rank - 2 else "time"
    elif tensor.name == "input" and len(state) == 3 == rank and where < 2:
        if _shape(tensor)[where] == state[1] != _shape(tensor)[1 - where]:
            yield "samples"
    elif tensor.name == "input" and (op.op.startswith("conv") or op.op in ("batch_norm", "instance_norm")):
        yield "samples" if where == 0 else "time"


def _of_state(op: OpCall, state: Collection[int], where: int, rank: int) -> Iterator[Sign]:
    """Read from weights and buffers beside the batch: they differ from step to step, never from sample to sample."""
    for tensor in op.inputs:
        if tensor.origin not in ("weight", "buffer") and tensor.producer not in state:
            continue
        shape = _shape(tensor)
        differing = {dim + rank - len(shape) for dim, count in enumerate(shape) if count > 1}
        if where in differing:
            yield "time"
        elif any(0 <= dim < rank - 1 for dim in differing):
            yield "samples"


def _joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], math.prod(shape[1:]))


def _shape(tensor: OpTensor | None) -> tuple[int, ...]:
    return tensor.stats.shape if tensor is not None and tensor.stats is not None else ()
