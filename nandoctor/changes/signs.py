"""Which tensors no batch can make negative, by the operations that made them."""

from __future__ import annotations

from collections.abc import Sequence

from nandoctor.changes.places import maker_of
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, CLAMPS, MAXIMA, MOVES

_POSITIVE = frozenset("exp exp2 softmax sigmoid softplus cosh".split())
_NEVER_NEGATIVE = frozenset(
    """abs square relu relu6 sqrt rsqrt acos acosh norm linalg_vector_norm
    linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm var std cdist pairwise_distance dist mse_loss l1_loss
    smooth_l1_loss huber_loss""".split()
)
_KEEPS_NONNEGATIVE = frozenset(
    """sum nansum mean nanmean amax amin max min cumsum prod cumprod mul div add reciprocal pow log1p expm1 median
    maximum minimum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d matmul mm bmm outer einsum""".split()
)
"""Ops whose result is non-negative if all their inputs are."""
_FACTORS = frozenset({"other", "alpha", "value", "min"})
_DEPTH = 16


def is_nonnegative(tensor: OpTensor, ops: Sequence[OpCall], depth: int = _DEPTH, *, nor_zero: bool = False) -> bool:
    """Return True if no batch can make the tensor negative, `nor_zero` but by rounding; False in doubt."""
    op = maker_of(tensor, ops)
    if op is None or depth == 0:
        return False
    scalars = dict(op.scalars)
    is_square = (op.op == "pow" and scalars.get("exponent", 1.0) % 2 == 0) or _is_square(op, ops)
    if op.op in _POSITIVE or (not nor_zero and (is_square or op.op in _NEVER_NEGATIVE)):
        return True
    floats = [taken for taken in op.inputs if taken.stats is not None]
    proved = [is_nonnegative(taken, ops, depth - 1, nor_zero=nor_zero) for taken in floats]
    low = scalars.get("min", scalars.get("min_val", -1.0))
    bounds = [is_proved for taken, is_proved in zip(floats, proved, strict=True) if taken.name in ("min", "other")]
    if op.op in CLAMPS | MAXIMA and (any(bounds) or low > 0 or (low == 0 and not nor_zero)):
        return True
    moves = op.op in (MOVES | CASTS) - {"copy"}  # their other inputs are indices
    takes_all = moves or (op.op in _KEEPS_NONNEGATIVE and len(floats) == len(op.inputs))
    return takes_all and bool(proved) and all(proved) and all(scalars.get(name, 0.0) >= 0 for name in _FACTORS)


def _is_square(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if the op multiplies a tensor by itself. Two outputs of one op, such as a split, are different."""
    if op.op != "mul" or len(op.inputs) != 2:
        return False
    one, other = op.inputs
    same = (one.producer, one.origin, one.path) == (other.producer, other.origin, other.path)
    if one.producer is None:
        return same and one.origin in ("weight", "buffer", "batch")
    return same and len(ops[one.producer].outputs) == 1
