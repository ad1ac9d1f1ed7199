"""The exam of an operation that made a non-finite value, while its tensors are still in hand.

In: the op, the arguments it had and the output it gave. Out: an `Exam`: the same op in float64, and what stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nandoctor.engine.stats import census_of, format_of, numbers_in
from nandoctor.evidence.formats import FP64, FloatFormat
from nandoctor.evidence.trace import Exam, Operand

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "linear", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm", "addbmm"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})


def examine(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[tuple[str, torch.Tensor]],
    output: torch.Tensor,
    *,
    low: FloatFormat,
) -> Exam:
    """Examine one op whose `output` is non-finite; `args` and `kwargs` are what it had before it ran."""
    output = output.detach()
    bad = ~torch.isfinite(output)
    own = format_of(output.dtype) or FP64
    census, _ = census_of(output, own, low)
    exact = recompute(op, args, kwargs, like=output)
    worst, exact_finite = _find_worst(bad, exact)
    return Exam(
        num_bad=census.num_bad,
        numel=output.numel(),
        kinds=census.kinds,
        samples=census.samples,
        first_index=census.first_bad_index,
        worst_index=worst,
        num_exact_finite=0 if exact_finite is None else int(exact_finite.sum()),
        exact_absmax=_absmax(exact, exact_finite),
        exact_at_worst=None if exact is None or worst is None else float(exact[worst]),
        length=_length(op, [tensor for _, tensor in operands], output),
        num_full_rows=_num_full_rows(op, args, kwargs),
        operands=tuple(describe_operand(name, tensor, worst, output, low) for name, tensor in operands),
    )


def recompute(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: torch.Tensor
) -> torch.Tensor | None:
    """The op's output in float64 from the same inputs, None where it cannot be had (no float64 kernel)."""
    wide_args, wide_kwargs = pytree.tree_map(_widen, (args, kwargs))
    try:
        with torch.no_grad(), _without_autocast():
            output = op(*wide_args, **wide_kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    leaves = (numbers_in(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return next((values.double() for values in leaves if values is not None and values.shape == like.shape), None)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(_widest(value.dtype))
    return _widest(value) if isinstance(value, torch.dtype) else value


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        yield


def _find_worst(bad: torch.Tensor, exact: torch.Tensor | None) -> tuple[tuple[int, ...] | None, torch.Tensor | None]:
    """The bad element whose exact value is largest, else the first bad one; and which bad ones are exactly finite."""
    if exact is None:
        return _unravel(bad.flatten().to(torch.uint8).argmax(), bad.shape), None
    finite = bad & torch.isfinite(exact)
    if finite.any():
        magnitudes = torch.where(finite, exact.abs(), -1.0)
        return _unravel(magnitudes.flatten().argmax(), bad.shape), finite
    return _unravel(bad.flatten().to(torch.uint8).argmax(), bad.shape), finite


def _unravel(flat: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flat), tuple(shape)))


def _absmax(exact: torch.Tensor | None, finite: torch.Tensor | None) -> float | None:
    if exact is None or finite is None or not finite.any():
        return None
    return float(exact[finite].abs().max())


def describe_operand(
    name: str, tensor: torch.Tensor, worst: tuple[int, ...] | None, output: torch.Tensor, low: FloatFormat
) -> Operand:
    """The counts of one operand, and its value where it meets the worst element of `output`."""
    tensor = tensor.detach()
    own = format_of(tensor.dtype) or FP64
    census, limits = census_of(tensor, own, low)
    return Operand(
        name=name,
        dtype=own.name,
        shape=tuple(tensor.shape),
        absmax=max(abs(limits[0]), abs(limits[1])) if limits else None,
        min=limits[0] if limits else None,
        max=limits[1] if limits else None,
        census=census,
        at_worst=_broadcast_value(tensor, worst, output),
    )


def _broadcast_value(tensor: torch.Tensor, index: tuple[int, ...] | None, output: torch.Tensor) -> float | None:
    """The operand's element that meets the output's element at `index`, where the shapes broadcast."""
    if index is None:
        return None
    try:
        value = float(tensor.expand(output.shape)[index])
    except RuntimeError:
        return None
    return value if math.isfinite(value) else None


def _length(op: torch._ops.OpOverload, operands: Sequence[torch.Tensor], output: torch.Tensor) -> int | None:
    """How many terms one output element sums, for products and reductions."""
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    if not operands:
        return None
    if name in _PRODUCTS:
        left = operands[-2] if name in ("addmm", "addmv", "baddbmm", "addbmm") else operands[0]
        return left.shape[-1] if left.dim() else None
    if name in _CONVOLUTIONS and len(operands) > 1:
        return math.prod(operands[1].shape[1:])
    if len(operands) == 1 and output.numel() and operands[0].numel() > output.numel():
        return operands[0].numel() // output.numel()
    return None


def _num_full_rows(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows that are -inf throughout, along the dimension of a softmax; in attention, along the keys of a mask."""
    name = op._schema.name.removeprefix("aten::")
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    if name == "scaled_dot_product_attention":
        mask = named.get("attn_mask")
        if mask is None:
            return None
        hidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
        return int(hidden.all(-1).sum())
    scores, dim = named.get("self"), named.get("dim")
    if not isinstance(scores, torch.Tensor) or not isinstance(dim, int) or not scores.is_floating_point():
        return None
    return int(torch.isneginf(scores).all(dim).sum()) if scores.dim() else None
