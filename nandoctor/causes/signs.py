"""Tells of which tensors the code proves that they are never negative, whatever the batch.

True only where it follows from the operations: of a square, a norm, a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping

from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import CASTS, CLAMPS, MAXIMA, MOVES

_NEVER_NEGATIVE = frozenset(
    """abs square exp exp2 softmax sigmoid relu relu6 softplus sqrt rsqrt acos acosh cosh norm linalg_vector_norm
    linalg_norm linalg_matrix_norm frobenius_norm nuclear_norm var std cdist pairwise_distance dist mse_loss l1_loss
    smooth_l1_loss huber_loss""".split()
)
_STAYS_SO = frozenset(
    """sum nansum mean nanmean amax amin max min cumsum prod cumprod mul div add reciprocal pow log1p expm1 median
    maximum minimum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d matmul mm bmm outer einsum""".split()
)
"""Of tensors that are nowhere negative these make none that is; an op that moves values takes indices beside them."""
_FACTORS = frozenset({"other", "alpha", "value", "min"})
_DEPTH = 16


def is_nonnegative(tensor: OpTensor, ops: Mapping[int, OpCall], depth: int = _DEPTH) -> bool:
    """Tell whether no batch can make the tensor negative; False in doubt."""
    op = ops.get(tensor.producer) if tensor.producer is not None else None
    if op is None or depth == 0:
        return False
    scalars = dict(op.scalars)
    if op.op in _NEVER_NEGATIVE or (op.op == "pow" and scalars.get("exponent", 1.0) % 2 == 0) or _is_square(op, ops):
        return True
    floats = [taken for taken in op.inputs if taken.stats is not None]
    proved = [is_nonnegative(taken, ops, depth - 1) for taken in floats]
    if op.op in CLAMPS | MAXIMA and (any(proved[1:]) or scalars.get("min", scalars.get("min_val", -1.0)) >= 0):
        return True
    moves = op.op in (MOVES | CASTS) - {"copy"}
    takes_all = moves or (op.op in _STAYS_SO and len(floats) == len(op.inputs))
    return takes_all and bool(proved) and all(proved) and all(scalars.get(name, 0.0) >= 0 for name in _FACTORS)


def _is_square(op: OpCall, ops: Mapping[int, OpCall]) -> bool:
    """Tell whether the op multiplies a tensor by itself; one of two halves that a split gave is another tensor."""
    if op.op != "mul" or len(op.inputs) != 2:
        return False
    one, other = op.inputs
    same = (one.producer, one.origin, one.path) == (other.producer, other.origin, other.path)
    if one.producer is None:
        return same and one.origin in ("weight", "buffer", "batch")
    return same and one.producer in ops and len(ops[one.producer].outputs) == 1
