"""Adapt what a model's own code says about CUDA and half precision to what the run is to compute.

Requests from TorchScript and C++ are not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nandoctor import torch_compat
from nandoctor.process_wide import PerThread, Shared, held, patched, read_switches, write_switches
from nandoctor.torch_compat import is_enabled, is_transforming, set_enabled, unwrap

_CAST_METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}
_DTYPE_QUERIES = frozenset({torch.finfo, torch.iinfo})
"""Functions that only query a dtype."""

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Functions in which torch suspends function modes, also while a checkpoint is recomputed."""

_SCALING: Mapping[Any, Any] = {
    getattr(owner, name): getattr(torch.ops.aten, op)
    for op, names in (
        ("mul", ("mul", "multiply", "__mul__", "__rmul__")),
        ("mul_", ("mul_", "multiply_", "__imul__")),
        ("div", ("div", "divide", "true_divide", "__truediv__", "__rtruediv__")),
        ("div_", ("div_", "divide_", "true_divide_", "__itruediv__")),
    )
    for name in names
    for owner in (Tensor, torch)
    if hasattr(owner, name)
}
"""The aten op of each function that multiplies or divides. Torch turns a Python number among their operands into a
tensor, which torch.func wraps, so that a Python kernel cannot take it."""

Wider = Mapping[torch.dtype, torch.dtype]
"""Formats, each with the one that takes its place."""

FP32_FOR_HALF: Wider = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
FP64_FOR_ALL: Wider = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def recast(formats: Wider, value: Any) -> Any:
    """Return a tensor in the format that replaces its own, or a format's replacement; any other value as it is."""
    return value.to(renamed(formats, value.dtype)) if isinstance(value, Tensor) else renamed(formats, value)


def renamed(formats: Wider, value: Any) -> Any:
    """Return a format's replacement; any other value as it is."""
    return formats.get(value, value) if isinstance(value, torch.dtype) else value


_on_host: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Tensors that CUDA code would have left on the CPU, by `id`: a mark on the tensor itself would be saved with it."""


@contextmanager
def cuda_code(device: torch.device, wider: Wider | None = None) -> Iterator[None]:
    """Build and run a model that was written for CUDA on `device` while the context is open.

    Formats that the code names, as in `x.half()` and `torch.zeros(n, dtype=torch.half)`, are replaced by `wider` ones.
    An autocast region for "cuda", or for `device.type` if the code reads it off a tensor, sets the autocast state of
    both. A region object that is made inside, as context or decorator, keeps its arguments and works whenever this
    context is open again; torch's own would warn that there is no CUDA and stay off for good. Tensors and modules that
    are sent to or made on "cuda" go to `device`. Only regions of the thread that entered this context are affected.
    """
    redirects = device.type != "cuda"
    literals = _Literals(device, wider or {}) if redirects or wider else nullcontext()
    with regions_patched, held((_replay, "device", device), (_replay, "is_marking", redirects)), literals:
        yield


_replay = PerThread(device=None, is_marking=False, saved_states=())
"""The device that this thread replays on, and the autocast states that its open regions will restore, each with its
region."""


def _device_types() -> tuple[str, ...]:
    """Return the device types that share one autocast state in this thread; none outside a replay."""
    return () if _replay.device is None else tuple({"cuda": None, _replay.device.type: None})


def _in_reference() -> bool:
    """Return True if the thread's autocast computes in float32, which the model's code must not lower again."""
    return _replay.device is not None and torch.get_autocast_dtype("cuda") is torch.float32


def _init_for_cuda(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def keep_intention(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        if device_type not in _device_types():
            init(self, device_type, dtype, enabled, *args, **kwargs)
            return
        # Without `enabled`, torch checks neither for CUDA nor for the dtypes of the CPU's autocast.
        init(self, device_type, dtype or torch.get_autocast_dtype("cuda"), False, *args, **kwargs)
        set_enabled(self, enabled)

    return keep_intention


def _enter_for_cuda(enter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(enter)
    def enter_on_both(self: Any) -> Any:
        types = _device_types()
        if self.device not in types:
            return enter(self)
        before = read_switches(("autocast",))
        dtype = torch.float32 if _in_reference() else self.fast_dtype
        entered = enter(self)
        _replay.saved_states = (*_replay.saved_states, (self, before))
        for name in types:
            torch.set_autocast_enabled(name, is_enabled(self))
            torch.set_autocast_dtype(name, dtype)
        return entered

    return enter_on_both


def _exit_for_cuda(leave: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(leave)
    def leave_both(self: Any, *raised: Any) -> Any:
        result = leave(self, *raised)
        if _replay.saved_states and _replay.saved_states[-1][0] is self:
            write_switches(_replay.saved_states[-1][1])
            _replay.saved_states = _replay.saved_states[:-1]
        return result

    return leave_both


def _cast_for_cuda(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Let `custom_fwd(cast_inputs=...)`, which casts only tensors of its own device type, cast on the replay's."""

    @wraps(cast)
    def cast_on_replay_device(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if device_type in _device_types():
            device_type = _replay.device.type
        return cast(value, device_type, torch.float32 if _in_reference() else dtype)

    return cast_on_replay_device


def _device_for_cuda(init: Callable[..., None]) -> Callable[..., None]:
    """Patch the mode of `with torch.device("cuda")`: it is below all other function modes, where ours sees nothing."""

    @wraps(init)
    def use_replay_device(self: Any, device: Any) -> None:
        init(self, _replay.device if _replay.device is not None and _names_cuda(device) else device)

    return use_replay_device


# Patched on the class, so that torch.autocast, torch.cuda.amp.autocast and every import of them are covered. The
# wrappers set `__wrapped__`, because TorchScript compiles the class from that source.
_PATCHES = (
    (torch_compat.AUTOCAST_INIT, _init_for_cuda),
    (torch_compat.AUTOCAST_ENTER, _enter_for_cuda),
    (torch_compat.AUTOCAST_EXIT, _exit_for_cuda),
    (torch_compat.CUSTOM_FWD_CAST, _cast_for_cuda),
    (torch_compat.DEVICE_CONTEXT_INIT, _device_for_cuda),
)
regions_patched = Shared(partial(patched, _PATCHES))
"""A context that patches regions, functions and devices for CUDA; outside of `cuda_code` they act as torch's own."""


def _names_cuda(device: Any) -> bool:
    """Return True if a device argument means CUDA: "cuda:0", `torch.device("cuda")`, or a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _Literals(TorchFunctionMode):
    """A function mode that replaces the formats named in the code by wider ones.

    On another device than CUDA it also redirects CUDA to that, and marks tensors that code leaves on the host.
    """

    def __init__(self, device: torch.device, wider: Wider) -> None:
        super().__init__()
        self._device, self._wider = device, wider
        self._redirects = device.type != "cuda"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._wider and func not in _DTYPE_QUERIES:
            if func in _CAST_METHODS:
                func, args = Tensor.to, (args[0], _CAST_METHODS[func])
            args = tuple(renamed(self._wider, value) for value in args)
            kwargs = {name: renamed(self._wider, value) for name, value in kwargs.items()}
        return self._run_here(func, args, kwargs) if self._redirects else func(*args, **kwargs)

    def _run_here(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.cuda:
            func, args, kwargs = Tensor.to, (args[0], self._device), {}
        if func is Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        if func in _SCALING and is_transforming():
            func, args, kwargs = _without_number_tensor(func, args, kwargs)
        if func in _BACKWARD:
            with held((_replay, "is_marking", False)):
                return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if isinstance(made, (Tensor, tuple)) and not torch.compiler.is_compiling():  # traced tensors have no `id`
            # A copied model's buffers are sent to the device later; its other tensors stay where training had them.
            _mark(made, () if func is Tensor.__deepcopy__ else (*args, *kwargs.values()))
        return made


def _without_number_tensor(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call that passes the number in `first * second` or `first / second` as a number, if there is one."""
    others = {**dict(zip(("input", "other"), args, strict=False)), **kwargs}
    first, second = others.pop("input", None), others.pop("other", None)
    if not isinstance(second, (int, float, complex)) or others.keys() - {"rounding_mode"}:
        return func, args, kwargs
    if func is Tensor.__rtruediv__:
        return torch.ops.aten.mul.Scalar, (first.reciprocal(), second), {}
    return getattr(_SCALING[func], "Scalar_mode" if others else "Scalar"), (first, second), others


def _mark(made: Any, arguments: tuple[Any, ...]) -> None:
    """Mark tensors made on the host: without a device argument or a tensor on the device; unmark those sent to it."""
    tensors = (made,) if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]
    if _is_from_device(arguments):
        for tensor in filter(_is_marked, tensors):
            del _on_host[id(tensor)]
    else:
        _on_host.update((id(tensor), tensor) for tensor in tensors)


def _is_from_device(arguments: tuple[Any, ...]) -> bool:
    items = (item for it in arguments for item in (it if isinstance(it, (list, tuple)) else (it,)))
    return any(isinstance(it, torch.device) or (isinstance(it, Tensor) and not _is_marked(it)) for it in items)


def _is_marked(tensor: Tensor) -> bool:
    return _on_host.get(id(tensor)) is tensor


def is_on_host(tensor: Tensor) -> bool:
    """Return True if code written for CUDA made the tensor on the CPU, and left it there.

    If nothing is marked, as in a checkpoint that `backward()` recomputes, only parameters are known not to be there.
    """
    if _replay.is_marking:
        return _is_marked(tensor) or _is_marked(unwrap(tensor))  # torch.func wraps what a function captures
    return not (tensor.requires_grad and tensor.is_leaf)
