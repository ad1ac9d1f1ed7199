"""Whether the rows of a tensor are the samples of the batch: followed along the traced ops, unknown in doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from nandoctor.diagnosis.batch_signs import Sign, is_state, read_signs
from nandoctor.evidence.trace import OpCall, OpTensor, Trace
from nandoctor.ops import PRODUCTS, RESHAPES, TRANSPOSES, dims_of, moves_rows

_Rows = int | Literal["blocks", "other", "none"]
"""Where the batch is in a tensor: the dimension that counts its samples, or blocks of all of them one after another in
dimension 0, as of the two halves of pairs; "other" is made of the batch in another order, "none" is not made of it."""


def as_samples(
    trace: Trace, indices: tuple[int, ...], shape: tuple[int, ...], producer: int | None
) -> tuple[int, ...] | None:
    """Indices along dimension 0 of a tensor as those of the batch, None where its rows may be something else.

    `producer` is the order of the op that made the tensor, None where it is not known: its length speaks for it then.
    """
    size = trace.num_samples
    if not indices or size is None or shape[:1] != (size,) or _names_rows(trace.ops, size):
        return None
    rows, signs = _follow(trace.ops, size)
    if trace.time_first != "never" and ("time" in signs or (trace.time_first == "possible" and not signs)):
        return None
    return indices if producer is None or rows[producer] == 0 else None


def _names_rows(ops: Sequence[OpCall], size: int) -> bool:
    """Tell whether indexes in the batch lead from row to row, as edges do, or whether the rows are steps in time."""
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
        if len(steps) == len(state) == 3 and steps[0] == size != state[1]:  # time comes first there
            return True
    return False


def _follow(ops: Sequence[OpCall], size: int) -> tuple[Mapping[int, _Rows], frozenset[Sign]]:
    """Where the batch is in what each op gave, and what the forward's ops show of the dimension that was followed."""
    rows: dict[int, _Rows] = {}
    signs: set[Sign] = set()
    state: set[int] = set()
    for op in ops:
        taken = [(tensor, _of_input(tensor, size, rows)) for tensor in op.inputs]
        made = {_carry(op, tensor, where, size) for tensor, where in taken if where != "none"} - {None}
        dims = [where for where in made if isinstance(where, int)]
        if dims and len(dims) == len(made):  # two of them in a matrix of pairs
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


def _of_input(tensor: OpTensor, size: int, rows: Mapping[int, _Rows]) -> _Rows:
    if tensor.producer is not None:
        return rows.get(tensor.producer, "none")
    if tensor.origin != "batch":
        return "none"
    return 0 if tensor.stats is None or tensor.stats.shape[:1] == (size,) else "other"


def _carry(op: OpCall, tensor: OpTensor, where: _Rows, size: int) -> _Rows | None:
    """Where the batch is in what the op gave, as far as this input goes; None for one that has no say in it."""
    made = op.outputs[0].shape
    if tensor.stats is None:  # integers, whose shape is not known: ids that an embedding looks up
        return 0 if made[:1] == (size,) else None
    taken = tensor.stats.shape
    is_factor = op.op in PRODUCTS
    if tensor.name != PRODUCTS[op.op].factors[0] if is_factor else len(taken) < min(len(made), 2):
        return None  # spread over the rows, or over their columns
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
    """Follow a dimension where those that the op swaps, adds or takes away are known; None where they are not."""
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
    """Keep the dimension that has as many elements before it; or has joined what follows it, in rows of each sample."""
    before = math.prod(taken[:where])
    for dim, count in enumerate(made):
        if math.prod(made[:dim]) == before and count != 1 and count % size == 0:
            return dim
    return "other"


def _shape(tensor: OpTensor | None) -> tuple[int, ...]:
    return tensor.stats.shape if tensor is not None and tensor.stats is not None else ()
