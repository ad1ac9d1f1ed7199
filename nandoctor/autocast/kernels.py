"""CUDA's autocast kernels, registered for the autocast dispatch key of any device, and the op lists that they follow.

`cuda_op_lists.json` has the lists by `aten` names with overload: those of torch, from or up to which version an op
is on them, and what is on no list. `tests/autocast/test_op_lists.py` compares them with the installed torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel

from nandoctor import torch_compat
from nandoctor.autocast.literals import FP32_FOR_HALF, is_on_host, renamed
from nandoctor.dumps.tensors import holds_finite
from nandoctor.file_memory import move_to_file
from nandoctor.process_wide import PerThread, Shared, held
from nandoctor.torch_compat import (
    TORCH,
    answers_itself,
    is_view,
    minor_version,
    plain_torch,
    registered,
    unwrap,
    version_of,
)

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload


@contextmanager
def install_kernels(device_type: str, version: tuple[int, int] = TORCH) -> Iterator[None]:
    """Make the autocast of a device type ("cpu") follow CUDA's op lists of a torch version while the context is open.

    The kernels read the thread's autocast dtype. Under float16 and bfloat16 a product is computed as by tensor cores:
    operands rounded to that type, products summed in float32, the result rounded once. Under float32 nothing is
    rounded, which makes the reference run. Registration is process-wide: another thread's own `torch.autocast` on this
    device type follows CUDA's lists too while the context is open.
    """
    with shared_kernels(device_type), held((_running, "casts", {}), (_running, "version", version)):
        yield


@cache
def shared_kernels(device_type: str) -> Shared:
    """Return a context that registers the kernels; weights are cast only once within `install_kernels`."""
    return Shared(lambda: registered(_make_kernels(device_type)))


@cache
def _make_kernels(device_type: str) -> list[tuple[str, str, Callable[..., Any]]]:
    """Return a kernel for each listed op that this torch has; other ops of the device's own list fall through."""
    key = f"Autocast{device_type.upper()}"
    own = [name.removeprefix("aten::") for name in torch_compat.list_ops(key) if name.startswith("aten::")]
    ops = {name: op for name in _RUNS if (op := torch_compat.find_op(f"aten::{name}")) is not None}
    kernels = {name: _make_kernel(op, name, device_type) for name, op in ops.items()}
    kernels |= dict.fromkeys([name for name in own if name not in _RUNS], fallthrough_kernel)
    return [(f"aten::{name}", key, kernel) for name, kernel in kernels.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a listed op, with its arguments as the dispatcher passes them: defaults are left out."""

    op: OpOverload
    device_type: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the autocast region around the call."""
        return torch.get_autocast_dtype(self.device_type)

    def is_eligible(self, value: Any) -> bool:
        """Return True if autocast casts this argument: `is_eligible` in torch's autocast_mode.h."""
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == self.device_type
        )

    def tensors(self) -> list[Tensor]:
        """Return the arguments that autocast casts, with lists of tensors flattened."""
        values = (*self.args, *self.kwargs.values())
        flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
        return [item for item in flat if self.is_eligible(item)]

    def cast(self, cast: Callable[[Tensor], Tensor]) -> _Call:
        """Return the same call with every tensor in `tensors` replaced by its cast."""

        def cast_eligible(value: Any) -> Any:
            return cast(value) if self.is_eligible(value) else value

        args = tuple(_map_items(cast_eligible, value) for value in self.args)
        kwargs = {name: _map_items(cast_eligible, value) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def run(self) -> Any:
        return self.op(*self.args, **self.kwargs)


Run = Callable[[_Call], Any]


_running = PerThread(op=False, version=TORCH, casts=None)
"""`op` is True while this thread is in a kernel that needs no further casts in the ops it calls. `version` is that of
the torch whose lists it follows. `casts` has the low-precision copies of weights in the innermost `install_kernels`,
None outside."""


def _make_kernel(op: OpOverload, name: str, device_type: str) -> Callable[..., Any]:
    run = _RUNS[name]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not is_listed(name, _running.version):
            return torch_compat.decompose(op, *args, **kwargs)
        call = _Call(op=op, device_type=device_type, args=args, kwargs=kwargs)
        if run is _run_several_products:
            return run(call)
        with torch_compat.without_autocast():
            # torch.func passes an op to its next level with autocast as it was outside of this kernel.
            if _running.op:
                return call.run()
            with held((_running, "op", True)):
                return run(call)

    return kernel


def _run_several_products(call: _Call) -> Any:
    """Run torch's own decomposition with autocast left on, so that each product inside is emulated by itself."""
    dtype = call.dtype
    lowered = call.cast(partial(_lower, dtype=dtype))
    return _round(torch_compat.decompose(call.op, *lowered.args, **lowered.kwargs), dtype)


def _run_cudnn_rnn(call: _Call) -> Any:
    dtype = torch.float32 if call.dtype is torch.float32 else torch.float16
    # cuDNN's wrapper copies the weights in each call, so their gradients are summed in fp32.
    return _emulate(call, dtype, lambda tensor: tensor.to(dtype))


def _emulate(call: _Call, dtype: torch.dtype, lower: Callable[[Tensor], Tensor]) -> Any:
    """Run one low-precision product: operands rounded, arithmetic in fp32, the result rounded once.

    The roundings are ordinary casts, so autograd rounds each gradient where CUDA does: the result's gradient arrives in
    `dtype`, is multiplied in fp32, and leaves in `dtype` before it reaches an fp32 weight. A tensor class that handles
    every op itself gets the operands that CUDA's autocast passes, and computes on its own.
    """
    if any(answers_itself(tensor) for tensor in call.tensors()):
        return call.cast(lower).run()

    def lift(tensor: Tensor) -> Tensor:
        lifted = lower(tensor).float()
        # matmul folds a batch into one matrix only if the weight requires a gradient, even under no_grad
        # (should_fold, aten/src/ATen/native/LinearAlgebra.cpp): without this the copy would take the slower bmm.
        # Inside torch.vmap and similar transforms, requires_grad_() is not allowed.
        lost_gradient = tensor.requires_grad and not lifted.requires_grad and not torch_compat.is_transforming()
        return lifted.requires_grad_() if lost_gradient else lifted

    return _round(call.cast(lift).run(), dtype)


def _run_in_fp32(call: _Call) -> Any:
    """Run on operands in fp32. Where CUDA asks an op for a `dtype` of fp32 instead, it computes the same from these."""
    return call.cast(Tensor.float).run()


def _run_in_widest(call: _Call) -> Any:
    """Run in fp32 if any tensor is fp32, else in the region's dtype: `promote_type` in autocast_mode.h."""
    dtypes = {call.dtype, *(tensor.dtype for tensor in call.tensors())}
    if torch.float32 in dtypes:
        return _run_in_fp32(call)
    if len(dtypes) > 1:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return call.run()


def _run_in_widest_rounded_once(call: _Call) -> Any:
    """Run as `promote_type`, but round once if all operands are half precision: a CPU would round in between."""
    dtypes = {tensor.dtype for tensor in call.tensors()}
    return _run_half(call) if dtypes == {call.dtype} else _run_in_widest(call)


def _run_half(call: _Call) -> Any:
    dtype = call.args[0].dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return call.run()
    result = _emulate(call, dtype, lambda tensor: tensor)
    if not result.is_complex():
        return result
    # Rounded to complex32, but kept as complex64, since complex32 has almost no CPU kernels.
    return torch.view_as_complex(torch.view_as_real(result).to(dtype).float())


def _run_scaling(call: _Call) -> Any:
    """Multiply or divide a half-precision tensor by a wider 0-d tensor; the result is in half precision.

    CUDA rounds the 0-d tensor first: a temperature of 1e-8 is 0 there. Only one on the host is used unrounded, as a CPU
    uses any second operand (`is_cpu_scalar`, aten/src/ATen/native/cpu/BinaryOpsKernel.cpp).
    """
    first, second, *others = call.args
    if not isinstance(second, Tensor):  # Python numbers are used unrounded
        return call.run()
    whole, single = (first, second) if first.dim() else (second, first)
    if single.dim() or not whole.dim() or whole.dtype not in FP32_FOR_HALF or single.is_complex():
        return call.run()
    wide = single if single.is_floating_point() else single.float()
    # Widened again: a recomputed checkpoint, where less is known, must save the same formats.
    number = wide if is_on_host(single) else wide.to(whole.dtype).to(wide.dtype)
    is_second = first is whole or call.op is torch.ops.aten.mul.Tensor
    return call.op(*((whole, number) if is_second else (number, whole)), *others, **call.kwargs)


def _refuse(call: _Call) -> Any:
    if call.dtype is torch.float32:
        return call.run()
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: CUDA's autocast refuses "
        "them. Use binary_cross_entropy_with_logits, or compute the loss with autocast off."
    )


def _run_cast(call: _Call) -> Any:
    """Run a cast of the model's own, without rounding to half precision in the reference."""
    if call.dtype is not torch.float32:
        return call.run()
    widen = partial(renamed, FP32_FOR_HALF)
    return call.op(*map(widen, call.args), **{name: widen(value) for name, value in call.kwargs.items()})


_DATA = json.loads(Path(__file__).with_name("cuda_op_lists.json").read_text(encoding="utf-8"))
LISTS: Mapping[str, list[str]] = {
    name: listed["ops"] for part in ("lists", "beside") for name, listed in _DATA[part].items()
}
"""The ops that a list has in any version: torch's lists, and those beside them."""


@cache
def is_listed(op: str, version: tuple[int, int]) -> bool:
    """Return True if an op that some version lists is on a list of this version of torch."""
    bounds = _DATA["versions"].get(op, {})
    since, until = minor_version(bounds.get("since", "")), minor_version(bounds.get("until", ""))
    return (since is None or since <= version) and (until is None or version < until)


_RUNS_OF_LISTS: dict[str, Run] = {
    "lower_precision": lambda call: _emulate(call, call.dtype, partial(_lower, dtype=call.dtype)),
    "several_products": _run_several_products,  # overrides some of lower_precision
    "cudnn_rnn": _run_cudnn_rnn,
    "fp32": _run_in_fp32,
    "fp32_by_hand": _run_in_fp32,
    "fp32_set_opt_dtype": _run_in_fp32,
    "fp32_append_dtype": _run_in_fp32,
    "promote": _run_in_widest,
    "promoted_and_rounded_once": _run_in_widest_rounded_once,  # overrides some of promote
    "banned": _refuse,
    "norms": _run_half,
    "rounded_once_on_cuda": _run_half,
    "half_on_cuda_alone": _run_half,
    "scaling": _run_scaling,
    "casts": _run_cast,
}
_RUNS = {op: run for name, run in _RUNS_OF_LISTS.items() for op in LISTS[name]}
"""The function that runs each listed op."""


def _round(result: Any, dtype: torch.dtype) -> Any:
    # Only results of lifted operands are float32; doubles and integers passed through unchanged.
    return _map_items(lambda item: item.to(dtype) if getattr(item, "dtype", None) is torch.float32 else item, result)


def _map_items(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to the value, or to each item of a list; lists in a schema do not nest."""
    return type(value)(map(change, value)) if isinstance(value, (list, tuple)) else change(value)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`; of a weight it is one copy for all its uses.

    As on CUDA (cached_cast in autocast_mode.cpp), the uses share one autograd node, so that the gradients of a weight
    that is used twice are summed in `dtype`. Unlike there, a weight that was written to is cast again.
    """
    casts: dict[tuple[int, torch.dtype], tuple[Tensor, int | None, Tensor]] | None = _running.casts
    is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not is_view(tensor)
    is_kept = is_weight and dtype is not torch.float32 and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    if casts is None or not is_kept:  # None in a recomputed checkpoint, whose casts belong only to its own graph
        return tensor.to(dtype)
    key = (id(tensor), dtype)  # the entry keeps the weight alive, and with it its id
    if key not in casts or casts[key][1] != version_of(tensor):
        casts[key] = (tensor, version_of(tensor), move_to_file(tensor.to(dtype)))
    return casts[key][2]


# The op is a composite without kernels of its own under these keys; inference mode uses the second.
_ATTENTION_KEYS = ("AutogradCPU", "CPU")
_by_reference_math = Shared(partial(sdpa_kernel, SDPBackend.MATH))


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite, looking inside `torch.func`'s wrappers; a fake tensor has no values."""
    plain = unwrap(tensor)
    with plain_torch():
        return hasattr(plain, "fake_mode") or holds_finite(plain.detach())


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the usual kernel on finite operands, and the reference's on others.

    The CPU's fused attention finds the largest score of a row by comparisons, which are false for NaN, and so returns
    finite values for a NaN query (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    with nullcontext() if all(map(_is_finite, (query, key, value))) else _by_reference_math:
        return torch_compat.decompose(
            torch.ops.aten.scaled_dot_product_attention.default, query, key, value, *args, **kwargs
        )


keep_nonfinite = Shared(
    lambda: registered([("aten::scaled_dot_product_attention", key, _attend) for key in _ATTENTION_KEYS])
)
"""A context in which attention on a CPU keeps every NaN and Inf, as a GPU's does."""
