"""Attention on a CPU that keeps every NaN, as that of a GPU does.

In: nothing. Out: `keep_nan_in_attention`, a context in which attention with a non-finite query, key or value is
computed by torch's reference math.

The fused kernel of the CPU takes the largest score of a row by comparisons that a NaN loses, and so returns finite
values for a query that is NaN (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). With finite operands the two agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor.process_wide import Shared
from nandoctor.torch_compat import decompose, kernel_library

# The op is a composite and has no kernel of its own under these keys; the second is asked in inference mode.
_KEYS = ("AutogradCPU", "CPU")
_by_reference_math = Shared(partial(sdpa_kernel, SDPBackend.MATH))


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    is_finite = all(bool(torch.isfinite(tensor).all()) for tensor in (query, key, value))
    with nullcontext() if is_finite else _by_reference_math:
        return decompose(torch.ops.aten.scaled_dot_product_attention.default, query, key, value, *args, **kwargs)


@contextmanager
def _registered() -> Iterator[None]:
    with kernel_library("aten") as library:
        for key in _KEYS:
            library.impl("scaled_dot_product_attention", _attend, key)  # type: ignore[no-untyped-call]
        yield


keep_nan_in_attention = Shared(_registered)
