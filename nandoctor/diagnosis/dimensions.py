"""Names what a tensor's dimensions count, by what the ops that make it and read it do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nandoctor.changes.places import ancestors
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import MOVES, NORMALISATIONS, PRODUCTS, SOFTMAXES, is_factor

Names = tuple[str, ...]
"""Names of dimensions, "" for an unknown one; those of an op are of the last dimensions of its tensor."""
_Use = tuple[OpCall, str]
"""An op and its input that a tensor is, "" for its result."""

_OF_SPACE = re.compile(r"(?<!atleast_)([123])d$")
"""torch names the ops of convolutional networks by the dimensions of space that follow the channels: max_pool2d."""
_SPACE = {"1": ("position",), "2": ("height", "width"), "3": ("depth", "height", "width")}
_TRANSPOSITIONS = frozenset("transpose permute t mT numpy_T movedim as_strided".split())
_STEPS_TO_HEADS = 6


def name_dimensions(order: int | None, shape: Sequence[int], ops: Sequence[OpCall]) -> Names:
    """Return what each dimension of a result of the op counts, "" where neither this op nor any near it tells.

    An op that gives a tensor of the same shape leaves the names as they are, unless it swaps dimensions.
    """
    names = [""] * len(shape)
    uses = [] if order is None else list(_uses(order, tuple(shape), ops))
    for told in (_of_attention(uses, ops, len(shape)), *(_of_op(op, name, len(shape)) for op, name in uses)):
        for place, name in enumerate(told[::-1][: len(names)]):
            names[-1 - place] = names[-1 - place] or name
    return tuple(names) if any(names) else ()


def with_samples(names: Names, rank: int) -> Names:
    """Return the names with that of the first dimension, once its rows are known to be samples."""
    return ("sample", *(names or ("",) * rank)[1:])


def _uses(order: int, shape: tuple[int, ...], ops: Sequence[OpCall]) -> Iterator[_Use]:
    """Yield the ops that make or read the tensor, or one with the same dimensions that it is computed from or to."""
    readers: dict[int | None, list[_Use]] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.stats is not None and tensor.stats.shape == shape:
                readers.setdefault(tensor.producer, []).append((op, tensor.name))
    found, waiting = set(), [order]
    while waiting:
        order = waiting.pop()
        if order in found:
            continue
        found.add(order)
        yield ops[order], ""
        if _keeps(ops[order], shape):
            of_shape = (tensor for tensor in ops[order].inputs if tensor.stats and tensor.stats.shape == shape)
            waiting += [tensor.producer for tensor in of_shape if tensor.producer is not None]
        yield from readers.get(order, [])
        waiting += [op.order for op, _ in readers.get(order, []) if _keeps(op, shape)]


def _keeps(op: OpCall, shape: tuple[int, ...]) -> bool:
    return op.op not in PRODUCTS and op.op not in _TRANSPOSITIONS and op.outputs[0].shape == shape


def _of_op(op: OpCall, name: str, rank: int) -> Names:
    """Return the names that an op's definition gives to its result or to an input of this rank."""
    space = _OF_SPACE.search(op.op)
    if name in ("", "self", "input") and space is not None:
        return ("channel", *_SPACE[space[1]])
    if name in ("", "input") and (op.op == "linear" or "layer_norm" in op.op):
        return ("feature",)
    if name in ("", "input") and op.op in NORMALISATIONS:
        return ("channel", *[""] * (rank - 2))
    if name in ("", "query", "key", "value") and op.op == "scaled_dot_product_attention":
        length = "query" if name in ("", "query") else "key"
        return ("head", length, "feature")[-(rank - 1) :]
    return ("class", *[""] * (rank - 2)) if name == "self" and op.op in ("cross_entropy_loss", "nll_loss") else ()


def _of_attention(uses: Sequence[_Use], ops: Sequence[OpCall], rank: int) -> Names:
    """Return the names if the tensor is a product's, and a softmax of it weights the values of an attention."""
    made = [op for op, name in uses if not name and op.op in PRODUCTS and op.op not in ("linear", "einsum")]
    softened = any(op.op in SOFTMAXES and dict(op.scalars).get("dim") in (-1, rank - 1) for op, _ in uses)
    weights = any(op.op in PRODUCTS and is_factor(op.op, name) for op, name in uses)
    if not (made and softened and weights):
        return ()
    has_heads = rank == 4 and made[0].outputs[0].shape[1] in _split_off(made[0], ops)
    return ("head" if has_heads else "", "query", "key")


def _split_off(product: OpCall, ops: Sequence[OpCall]) -> set[int]:
    """Return the lengths of the dimensions into which the features of a factor were split."""
    lengths = set[int]()
    factor = next(tensor for tensor in product.inputs if is_factor(product.op, tensor.name))
    for op in ancestors(ops, factor, _STEPS_TO_HEADS, through=MOVES):
        before, after = op.inputs[0].stats, op.outputs[0].shape
        if op.op in MOVES and before is not None and before.shape[:-1] == after[: len(before.shape) - 1]:
            lengths.update(after[len(before.shape) - 1 :])
    return lengths
