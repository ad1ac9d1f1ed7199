"""Analyses an op that made a non-finite value, while its tensors are still there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nandoctor.autocast.literals import FP64_FOR_ALL
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.trace import OpAnalysis, Operand
from nandoctor.ops import POINTWISE, PRODUCTS, num_terms
from nandoctor.torch_compat import plain_torch, tree_tensors, unwrap, without_autocast
from nandoctor.tracing.dispatch_hook import Invocation
from nandoctor.tracing.exact_counts import count_exactly, find_largest, find_nonfinite
from nandoctor.tracing.tensor_stats import all_finite, format_of, numbers_in


def examine(call: Invocation, outputs: Sequence[torch.Tensor]) -> OpAnalysis:
    """Analyse an op with a non-finite output; `call` holds the arguments as they were before it ran."""
    made = [numbers_in(output) for output in outputs]
    place, output = next((i, o) for i, o in enumerate(made) if o is not None and not all_finite(o))
    exact, rows = recompute(call, place, like=output), full_rows(call)
    with plain_torch():  # a transform of torch.func would wrap every number that is read
        made_here = _without_passed_on(call, output)
        output = output if all_finite(made_here) else made_here
        counts, _ = count_exactly(output, place=True)
        numel = output.numel()
        worst, value = _find_worst(find_nonfinite(output), exact)
        if (each := _before_reduction(call)) is not None and not all_finite(each):
            output, worst = each, find_largest(find_nonfinite(each).numpy(force=True))
        taken = ((name, _operand_values(name, tensor)) for name, tensor in call.tensors())
        operands = [(name, values) for name, values in taken if values is not None]
        return OpAnalysis(
            counts=counts,
            numel=numel,
            exact=value,
            length=_length(call, [tensor for _, tensor in operands], output),
            num_full_rows=None if rows is None else int(unwrap(rows).sum()),
            operands=tuple(describe_operand(name, tensor, worst, output) for name, tensor in operands),
        )


def _before_reduction(call: Invocation) -> torch.Tensor | None:
    """Return what a loss of torch's computes for each element, before its mean or sum; None for any other op."""
    if not dict(call.arguments()).get("reduction"):
        return None
    with torch.no_grad(), without_autocast():
        return numbers_in(call.with_argument("reduction", 0).run())


def find_passed_on(name: str, operands: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    """Return where an op only passes on what it was given at the same element; None if it is no elementwise op.

    That is an infinity for an infinity, as masked rows are no sample's fault, and a NaN for a NaN. A function that is
    infinite for some finite inputs makes NaN of infinities, and passes on both.
    """
    finds = (find_nonfinite,) if name in POINTWISE else (torch.isinf, torch.isnan)
    passed = torch.zeros_like(output, dtype=torch.bool)
    for values in (values for values in operands if not all_finite(values)):
        if name in PRODUCTS or not _expands(values, output):
            return None
        for find in finds:
            passed |= find(output) & find(values).expand(output.shape)
    return passed


def _expands(values: torch.Tensor, output: torch.Tensor) -> bool:
    """Return False if an operand has another shape, as that of a reduction."""
    sizes = zip(reversed(values.shape), reversed(output.shape), strict=False)
    return values.dim() <= output.dim() and all(own in (1, whole) for own, whole in sizes)


def _without_passed_on(call: Invocation, output: torch.Tensor) -> torch.Tensor:
    """Return the output with zeros for what an elementwise op passes on."""
    operands = [values for _, tensor in call.tensors() if (values := numbers_in(tensor)) is not None]
    passed = find_passed_on(call.name, operands, output)
    return output if passed is None else output.masked_fill(passed, 0.0)


def makes_of_finite(call: Invocation, outputs: Sequence[torch.Tensor]) -> bool:
    """Return True if a function that is infinite for some finite inputs was given those, whatever is beside them."""
    made = [values for output in outputs if (values := numbers_in(output)) is not None]
    return call.name in POINTWISE and not all(all_finite(_without_passed_on(call, values)) for values in made)


def _operand_values(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of an operand; integers too if the op computes with them, as a division does."""
    is_integer = format_of(tensor.dtype) is None and tensor.dtype is not torch.bool
    return tensor.double() if is_integer and name in ("self", "other") else numbers_in(tensor)


def recompute(call: Invocation, place: int, *, like: torch.Tensor) -> torch.Tensor | None:
    """Return the op's output at `place` in float64 from the same inputs, or None if that fails (no float64 kernel)."""
    try:
        with torch.no_grad(), without_autocast():
            output = call.mapped(_widen).run()
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):  # AssertionError: from a tensor class
        return None
    leaves = tree_tensors(output)
    values = numbers_in(leaves[place]) if place < len(leaves) else None
    with plain_torch():
        return None if values is None or values.shape != like.shape else values.double()


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(FP64_FOR_ALL.get(value.dtype, value.dtype))
    return FP64_FOR_ALL.get(value, value) if isinstance(value, torch.dtype) else value


def _find_worst(nonfinite: torch.Tensor, exact: torch.Tensor | None) -> tuple[tuple[int, ...], float | None]:
    """Return the non-finite element with the largest exact value, and that value; else the first one and None."""
    places = nonfinite.numpy(force=True)
    if exact is not None:
        values = np.abs(exact.numpy(force=True))
        magnitudes = np.where(places & (values < math.inf), values, -1.0)  # NaN < inf is False
        worst = find_largest(magnitudes)
        if magnitudes[worst] >= 0:
            return worst, float(exact[worst])
    return find_largest(places), None


def describe_operand(name: str, tensor: torch.Tensor, worst: tuple[int, ...] | None, output: torch.Tensor) -> Operand:
    """Return the counts of one operand, and its value where it meets the worst element of `output`, if it is finite."""
    tensor = tensor.detach()
    counts, limits = count_exactly(tensor)
    meets = worst is not None and _expands(tensor, output)
    value = float(tensor.expand(output.shape)[worst]) if meets else math.nan
    return Operand(
        name=name,
        dtype=format_of(tensor.dtype) or FP64,
        shape=tuple(tensor.shape),
        absmax=max(abs(limits[0]), abs(limits[1])) if limits else None,
        min=limits[0] if limits else None,
        max=limits[1] if limits else None,
        counts=counts,
        at_worst=value if math.isfinite(value) else None,
    )


def _length(call: Invocation, operands: Sequence[torch.Tensor], output: torch.Tensor) -> int | None:
    """Return how many terms one output element sums, for products and reductions; None if that is not known."""
    if call.name in PRODUCTS:
        return num_terms(call.name, dict(call.arguments()))
    if len(operands) == 1 and output.numel() and operands[0].numel() > output.numel():
        return operands[0].numel() // output.numel()
    return None


def full_rows(call: Invocation) -> torch.Tensor | None:
    """Return the mask of rows that are -inf throughout, along a softmax's dimension or the keys of an attention mask.

    That dimension has length 1 in the result, which is None for an op without such rows.
    """
    named = dict(call.arguments())
    if call.name == "scaled_dot_product_attention":
        mask = named.get("attn_mask")
        if mask is None:
            return None
        return (~mask if mask.dtype == torch.bool else torch.isneginf(mask)).all(-1, keepdim=True)
    scores, dim = named.get("self"), named.get("dim")
    if not isinstance(scores, torch.Tensor) or not isinstance(dim, int) or not scores.is_floating_point():
        return None
    return torch.isneginf(scores).all(dim, keepdim=True) if scores.dim() else None
