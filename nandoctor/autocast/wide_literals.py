"""Half precision that a model's code asks for by name, computed in the format of a reference.

Under `WideLiterals`, `x.half()`, `x.to(torch.bfloat16)` and `torch.zeros(n, dtype=torch.half)` give wider tensors.

What TorchScript and C++ ask for is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CAST_METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}
_OTHER_MEANING = frozenset({Tensor.view, torch.finfo, torch.iinfo})
"""Where a dtype reads the same bits anew, or is asked about."""

FP32_FOR_HALF: Mapping[torch.dtype, torch.dtype] = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
FP64_FOR_ALL: Mapping[torch.dtype, torch.dtype] = dict.fromkeys(
    (torch.float16, torch.bfloat16, torch.float32), torch.float64
)


class WideLiterals(TorchFunctionMode):
    """Puts wider dtypes in the place of those that the code names."""

    def __init__(self, wider: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._wider = wider

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or the cast to the wider dtype."""
        kwargs = kwargs or {}
        named = _CAST_METHODS.get(func)
        if named is not None and named in self._wider:
            return args[0].to(self._wider[named], **kwargs)
        if func in _OTHER_MEANING:
            return func(*args, **kwargs)
        return func(*map(self._widen, args), **{name: self._widen(value) for name, value in kwargs.items()})

    def _widen(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value
