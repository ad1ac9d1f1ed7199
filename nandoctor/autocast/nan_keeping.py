"""A CPU kernel of attention that keeps every NaN and Inf, as a GPU's do.

With a non-finite operand it is computed without the shortcut that loses it; with finite operands the usual kernel runs.

The CPU's fused attention finds the largest score of a row by comparisons, which are false for NaN, and so returns
finite values for a NaN query (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor.dumps.tensors import holds_finite
from nandoctor.process_wide import Shared
from nandoctor.torch_compat import decompose, plain_torch, registered, unwrap

# The op is a composite without kernels of its own under these keys; inference mode uses the second.
_ATTENTION_KEYS = ("AutogradCPU", "CPU")
_by_reference_math = Shared(partial(sdpa_kernel, SDPBackend.MATH))


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite, looking inside `torch.func`'s wrappers; a fake tensor has no values."""
    plain = unwrap(tensor)
    with plain_torch():
        return hasattr(plain, "fake_mode") or holds_finite(plain.detach())


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if all(map(_is_finite, (query, key, value))) else _by_reference_math:
        return decompose(torch.ops.aten.scaled_dot_product_attention.default, query, key, value, *args, **kwargs)


keep_nonfinite = Shared(
    lambda: registered([("aten::scaled_dot_product_attention", key, _attend) for key in _ATTENTION_KEYS])
)
