"""CPU kernels that keep every NaN and Inf, as a GPU's do.

Attention and convolutions with a non-finite operand are computed without the shortcuts that lose it; with finite
operands the usual kernels run.

The CPU's fused attention finds the largest score of a row by comparisons, which are false for NaN, and so returns
finite values for a NaN query (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). oneDNN's convolutions skip the
products with padding, and with them a NaN or Inf weight: `0 * NaN` is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor.dumps.tensors import as_stored
from nandoctor.process_wide import Shared
from nandoctor.torch_compat import decompose, kernel_library, plain_torch, run_default, unwrap
from nandoctor.trees import tree_map

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

# The op is a composite without kernels of its own under these keys; inference mode uses the second.
_ATTENTION_KEYS = ("AutogradCPU", "CPU")
_by_reference_math = Shared(partial(sdpa_kernel, SDPBackend.MATH))
_IN_ONEDNN = (torch.float32, torch.float16, torch.bfloat16)


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite, looking inside `torch.func`'s wrappers; a fake tensor has no values."""
    plain = unwrap(tensor)
    with plain_torch():
        return hasattr(plain, "fake_mode") or holds_finite(plain.detach())


def holds_finite(values: Tensor) -> bool:
    """Return True if real numbers are all finite: one pass, where `torch.isfinite` takes ten times as long."""
    if values.numel() == 0:
        return True
    return all(math.isfinite(limit) for limit in torch.aminmax(as_stored(values)))


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if all(map(_is_finite, (query, key, value))) else _by_reference_math:
        return decompose(torch.ops.aten.scaled_dot_product_attention.default, query, key, value, *args, **kwargs)


def _convolve(op: OpOverload, *args: Any) -> Any:
    """Run a convolution or its backward; the first three arguments are its tensors, and a bias may be None.

    In the forward only the weight is multiplied with padding: with a finite weight nothing is lost of a non-finite
    image, as in every layer after an overflow. In the backward the gradient is too, and in that of a transposed
    convolution the image.
    """
    dtype, is_forward = args[0].dtype, op is torch.ops.aten.convolution.default
    is_transposed = args[-3 if is_forward else -4]
    asked = args[1:2] if is_forward else args[:3] if is_transposed else args[:3:2]
    if dtype not in _IN_ONEDNN or all(map(_is_finite, asked)):
        return run_default(op, *args)
    if not is_transposed:
        return _on_padded_image(op, args, 0 if is_forward else 1)
    # oneDNN has no kernel for float64, which is twenty times as slow.
    made = run_default(op, *(None if tensor is None else tensor.double() for tensor in args[:3]), *args[3:])
    return tree_map(lambda value: value.to(dtype) if isinstance(value, torch.Tensor) else value, made)


def _on_padded_image(op: OpOverload, args: tuple[Any, ...], image: int) -> Any:
    """Run a convolution, or its backward, on argument `image` padded beforehand, so that no products are skipped."""
    place = 4 if image == 0 else 5
    padding = list(args[place])
    padded = torch.nn.functional.pad(args[image], [width for width in reversed(padding) for _ in range(2)])
    made = run_default(op, *args[:image], padded, *args[image + 1 : place], [0] * len(padding), *args[place + 1 :])
    if image == 0:
        return made
    gradient, *others = made
    for dim, width in enumerate(padding if gradient is not None else (), 2):
        gradient = gradient.narrow(dim, width, args[image].shape[dim])
    return gradient, *others


@contextmanager
def _registered() -> Iterator[None]:
    with kernel_library("aten") as library:
        for key in _ATTENTION_KEYS:
            library.impl("scaled_dot_product_attention", _attend, key)  # type: ignore[no-untyped-call]
        for op in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward):
            library.impl(op.default, partial(_convolve, op.default), "CPU")  # type: ignore[no-untyped-call]
        yield


keep_nonfinite = Shared(_registered)
