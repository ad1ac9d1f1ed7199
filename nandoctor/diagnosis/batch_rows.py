"""Finds out whether a tensor's rows are the samples of the batch, along the traced ops; unknown in doubt."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from nandoctor.evidence.trace import OpCall, OpTensor, TensorStats, Trace
from nandoctor.ops import (
    NORMALISATIONS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    SOFTMAXES,
    SUMS,
    TRANSPOSES,
    dims_of,
    moves_rows,
)

Sign = Literal["samples", "time"]

_BATCHED_PRODUCTS = frozenset({"bmm", "baddbmm", "matmul", "scaled_dot_product_attention"})
_PICKS = frozenset({"select", "slice", "narrow", "unbind", "index_select", "flip", "roll"})
_ALONG = REDUCTIONS | SOFTMAXES | _PICKS | {"amax", "amin", "max", "min", "median", "argmax", "sort", "topk"}
_FIRST_BY_DEFAULT = frozenset({"slice", "unbind", "select"})
_COPYING = frozenset({"expand", "expand_as", "repeat", "repeat_interleave"})


def is_state(op: OpCall, state: Collection[int]) -> bool:
    """Return True if only weights and buffers went into the op; `state` has the orders of earlier such ops."""
    floats = [tensor for tensor in op.inputs if tensor.stats is not None]
    return (
        bool(floats)
        and op.op not in _COPYING
        and all(tensor.origin in ("weight", "buffer") or tensor.producer in state for tensor in floats)
    )


def read_signs(op: OpCall, followed: Sequence[tuple[OpTensor, int]], state: Collection[int]) -> Iterator[Sign]:
    """Yield what the op reveals about the followed dimension, whose index is given with each tensor."""
    for tensor, where in followed:
        shape = _shape(tensor)
        rank = len(shape)
        if rank < 3:
            continue  # sequences have features as well
        if op.op in _ALONG and rank == 3:
            yield from _read_dims(op, tensor, where)
        elif op.op in PRODUCTS or op.op in NORMALISATIONS:
            yield from _read_layer(op, tensor, where, num_factors=len(followed))
        elif op.op in RESHAPES and where == 0 and rank == 3 and op.outputs[0].shape == (shape[0], math.prod(shape[1:])):
            yield "samples"
        elif op.op in SUMS | {"mul"}:
            yield from _read_state(op, state, where, rank)


def _read_dims(op: OpCall, tensor: OpTensor, where: int) -> Iterator[Sign]:
    """Yield what a selection or reduction reveals; along the features, or all dimensions but these, it is nothing."""
    dims = set(dims_of(op, 3) or ((0,) if op.op in _FIRST_BY_DEFAULT else ()))
    is_whole = op.op in ("slice", "narrow") and op.outputs[0].shape == _shape(tensor)
    if not dims or is_whole or dims >= {0, 1}:
        return
    if where in dims:
        yield "time"
    elif dims & {0, 1}:
        yield "samples"


def _read_layer(op: OpCall, tensor: OpTensor, where: int, *, num_factors: int) -> Iterator[Sign]:
    """Yield what a product or a norm reveals: samples come first, then matrices, time or channels."""
    rank, named = len(_shape(tensor)), {item.name: item for item in op.inputs}
    state = _shape(named.get("hx[0]", named.get("hx")))
    if op.op in _BATCHED_PRODUCTS and num_factors > 1:
        yield "samples" if where < rank - 2 else "time"
    elif tensor.name == "input" and len(state) == 3 == rank and where < 2:
        if _shape(tensor)[where] == state[1] != _shape(tensor)[1 - where]:
            yield "samples"
    elif tensor.name == "input" and (op.op.startswith("conv") or op.op in ("batch_norm", "instance_norm")):
        yield "samples" if where == 0 else "time"


def _read_state(op: OpCall, state: Collection[int], where: int, rank: int) -> Iterator[Sign]:
    """Yield what weights and buffers beside the batch reveal: they may vary along time, never along samples."""
    for tensor in op.inputs:
        if tensor.origin not in ("weight", "buffer") and tensor.producer not in state:
            continue
        shape = _shape(tensor)
        differing = {dim + rank - len(shape) for dim, count in enumerate(shape) if count > 1}
        if where in differing:
            yield "time"
        elif any(0 <= dim < rank - 1 for dim in differing):
            yield "samples"


_Rows = int | Literal["blocks", "other", "none"]
"""Where the samples are in a tensor: the index of their dimension; "blocks" for several whole batches one after another
in dimension 0, such as both halves of pairs; "other" for another order; "none" if it does not depend on the batch."""


def as_samples(
    trace: Trace, indices: tuple[int, ...], shape: tuple[int, ...], producer: int | None
) -> tuple[int, ...] | None:
    """Return indices along dimension 0 of a tensor as samples of the batch, or None if its rows may be something else.

    `producer` is the order of the op that made the tensor. If it is None, the size of dimension 0 decides.
    """
    size = trace.num_samples
    if not indices or size is None or shape[:1] != (size,) or _names_rows(trace.ops, size):
        return None
    rows, signs = _follow(trace.ops, size)
    if trace.time_first != "never" and ("time" in signs or (trace.time_first == "possible" and not signs)):
        return None
    return indices if producer is None or rows[producer] == 0 else None


def is_weight_gradient(made: TensorStats, forward: OpCall) -> bool:
    """Return True if an outgoing gradient may be that of a weight, by its shape: its rows are no samples then."""
    weights = (tensor.stats for tensor in forward.inputs if tensor.origin == "weight" and tensor.stats is not None)
    return any(stats.shape == made.shape for stats in weights)


def _names_rows(ops: Sequence[OpCall], size: int) -> bool:
    """Return True if indices in the batch refer to rows, as a graph's edges do, or if the rows are time steps."""
    for op in ops:
        named = {tensor.name: tensor for tensor in op.inputs}
        index = named.get("indices[0]", named.get("index"))
        if (
            index is not None
            and index.origin == "batch"
            and moves_rows(op, 0)
            and _shape(named.get("self"))[:1] == (size,)
        ):
            return True
        steps, state = _shape(named.get("input")), _shape(named.get("hx[0]", named.get("hx")))
        if len(steps) == len(state) == 3 and steps[0] == size != state[1]:  # an RNN with time first
            return True
    return False


def _follow(ops: Sequence[OpCall], size: int) -> tuple[Mapping[int, _Rows], frozenset[Sign]]:
    """Return where the samples are in each op's result, and what the forward's ops reveal about that dimension."""
    rows: dict[int, _Rows] = {}
    signs: set[Sign] = set()
    state: set[int] = set()
    for op in ops:
        taken = [(tensor, _rows_of_input(tensor, size, rows)) for tensor in op.inputs]
        made = {_carry(op, tensor, where, size) for tensor, where in taken if where != "none"} - {None}
        dims = [where for where in made if isinstance(where, int)]
        if dims and len(dims) == len(made):  # a matrix of pairs has two
            rows[op.order] = min(dims)
        elif made == {"blocks"}:
            rows[op.order] = "blocks"
        else:
            rows[op.order] = "other" if any(where != "none" for _, where in taken) else "none"
        if is_state(op, state):
            state.add(op.order)
        if op.phase == "forward":
            followed = [(tensor, where) for tensor, where in taken if isinstance(where, int)]
            signs.update(read_signs(op, followed, state))
    return rows, frozenset(signs)


def _rows_of_input(tensor: OpTensor, size: int, rows: Mapping[int, _Rows]) -> _Rows:
    if tensor.producer is not None:
        return rows.get(tensor.producer, "none")
    if tensor.origin != "batch":
        return "none"
    return 0 if tensor.stats is None or tensor.stats.shape[:1] == (size,) else "other"


def _carry(op: OpCall, tensor: OpTensor, where: _Rows, size: int) -> _Rows | None:
    """Return where the samples are in the op's result according to this input; None for an input that does not decide.

    A broadcast tensor and the second factor of a product do not.
    """
    made = op.outputs[0].shape
    if tensor.stats is None:  # integers, whose shape is not known, such as an embedding's ids
        return 0 if made[:1] == (size,) else None
    taken = tensor.stats.shape
    is_factor = op.op in PRODUCTS
    is_spread = len(taken) < min(len(made), 2) and math.prod(taken) < math.prod(made)
    if tensor.name != PRODUCTS[op.op].factors[0] if is_factor else is_spread:
        return None
    if isinstance(where, int):
        return _carry_dim(op, taken, where, size)
    if where == "blocks":
        return _carry_blocks(op, taken, made, size)
    return where if taken[:1] == made[:1] else None


def _carry_dim(op: OpCall, taken: tuple[int, ...], where: int, size: int) -> _Rows:
    made = op.outputs[0].shape
    if op.op == "cat" and where == 0 and made[0] != taken[0] and made[0] % size == 0:
        return "blocks"
    if moves_rows(op, where):
        return "other"
    if op.op in RESHAPES:
        return _carry_reshape(taken, made, where, size)
    carried = _carry_named(op, taken, where)
    return _carry_by_size(op, taken, where) if carried is None else carried


def _carry_named(op: OpCall, taken: tuple[int, ...], where: int) -> int | None:
    """Return a dimension's new index if the op names the dimensions that it swaps, adds or removes, else None."""
    made, scalars, dims = op.outputs[0].shape, dict(op.scalars), dims_of(op, len(taken))
    if "dim0" in scalars and "dim1" in scalars:
        swapped = [int(scalars[name]) % len(taken) for name in ("dim0", "dim1")]
        return swapped[1 - swapped.index(where)] if where in swapped else where
    if op.op == "permute" and len(dims) == len(made):
        return dims.index(where)
    if op.op == "unsqueeze":
        return where + (dims_of(op, len(made))[0] <= where)
    if dims and where not in dims and len(made) == len(taken) - len(dims):
        return where - sum(dim < where for dim in dims)
    return None


def _carry_by_size(op: OpCall, taken: tuple[int, ...], where: int) -> _Rows:
    made, dims = op.outputs[0].shape, dims_of(op, len(taken))
    has_dim = bool(dims) and where not in dims
    is_kept = (len(taken) == len(made) or op.op in PRODUCTS or has_dim) and op.op not in TRANSPOSES
    if is_kept and made[where : where + 1] == taken[where : where + 1]:
        return where
    count = taken[where]
    return made.index(count) if taken.count(count) == made.count(count) == 1 else "other"


def _carry_blocks(op: OpCall, taken: tuple[int, ...], made: tuple[int, ...], size: int) -> _Rows:
    if op.op in ("chunk", "split", "slice", "unsafe_chunk", "unsafe_split"):
        is_whole = made[:1] == (size,) and dict(op.scalars).get("start", 0) % size == 0
        return 0 if is_whole else "other"
    return "blocks" if taken[:1] == made[:1] and not moves_rows(op, 0) and op.op not in TRANSPOSES else "other"


def _carry_reshape(taken: tuple[int, ...], made: tuple[int, ...], where: int, size: int) -> _Rows:
    """Return the dimension with as many elements before it; the next ones may be joined to it, as rows per sample."""
    before = math.prod(taken[:where])
    for dim, count in enumerate(made):
        if math.prod(made[:dim]) == before and count != 1 and count % size == 0:
            return dim
    return "other"


def _shape(tensor: OpTensor | None) -> tuple[int, ...]:
    return tensor.stats.shape if tensor is not None and tensor.stats is not None else ()
