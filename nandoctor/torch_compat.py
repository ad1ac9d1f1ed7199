"""Wrap every private API of torch that nandoctor uses, and what differs between its versions, in one place.

The Recorder runs on torch 2.4 and newer, a replay on 2.6 and newer: docs/versions.md has what was run on which.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, reduce
from operator import attrgetter, or_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.library import Library

from nandoctor.errors import UnsupportedTorchError
from nandoctor.trees import walk

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload  # noqa: PLC0414 - exported


def minor_version(text: str) -> tuple[int, int] | None:
    """Return (2, 6) for "2.6.0+cu124"; None for a text that is no version."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})\b", text)
    return (int(found[1]), int(found[2])) if found else None


TORCH = minor_version(torch.__version__) or (0, 0)


def other_torch(text: str) -> str:
    """Return a version of torch as it is if it is another than this one, apart from patches and builds; else ""."""
    return text if minor_version(text) not in (None, TORCH) else ""


# Replaced by nandoctor.process_wide.patched

AUTOCAST_INIT = "torch.amp.autocast_mode.autocast.__init__"
AUTOCAST_ENTER = "torch.amp.autocast_mode.autocast.__enter__"
AUTOCAST_EXIT = "torch.amp.autocast_mode.autocast.__exit__"
CUSTOM_FWD_CAST = "torch.amp.autocast_mode._cast"
DEVICE_CONTEXT_INIT = "torch.utils._device.DeviceContext.__init__"
HIGHER_ORDER_KEYS = "torch._ops._compute_keyset"
MAKE_SUBCLASS = "torch.Tensor._make_subclass"
CHECKPOINT_APPLY = "torch.utils.checkpoint.CheckpointFunction.apply"

# The dispatcher processes this key before autocast, autograd and the decomposition of composite ops, so an op is seen
# once, under the name that the user called. Torch reserves the key for its own tests and registers no kernels for it.
OBSERVER_KEY = "TESTING_ONLY_GenericMode"


def check_torch() -> None:
    """Raise UnsupportedTorchError if this torch is older than 2.6, and so can only record."""
    if TORCH < (2, 6):
        raise UnsupportedTorchError(
            f"A replay needs torch 2.6 or newer, and this is {torch.__version__}, which can only record.",
            remedy="Copy the dump to an environment with a newer torch: it need not be the one that wrote it.",
        )


def look_up(place: str) -> Any:
    """Return what torch has at a dotted place now.

    Raises:
        UnsupportedTorchError: it has nothing there.
    """
    try:
        return pkgutil.resolve_name(place)
    except AttributeError as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} lacks {place}, which nandoctor needs.",
            remedy="Install a torch that nandoctor was run on: docs/versions.md lists them.",
        ) from error


_find = cache(look_up)


# Differences between versions

FP32_PRODUCTS = (
    ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn") if TORCH >= (2, 9) else ()
)
"""The places below `torch.backends` with an `fp32_precision`: before torch 2.9 there are `allow_tf32` and the like."""


def default_device() -> torch.device:
    """Return the device that tensors are made on.

    Up to torch 2.9, `torch.get_default_device` raises once `torch.set_default_device(None)` was called.
    """
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


# Watching operations


def without_observer(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what computes a higher-order operator's keys to omit the observer's key, for which it has no kernel."""
    return lambda args, kwargs, keys: compute(args, kwargs, keys.remove(_observer_key()))


def observed() -> AbstractContextManager[None]:
    """Return a context in which this thread's ops go to the observer's kernel."""
    return _guard("Include", _observer_key())


def unobserved() -> AbstractContextManager[None]:
    """Return a context in which the op tracer does not see this thread's ops, for ops of nandoctor itself."""
    return _guard("Exclude", _key_set(OBSERVER_KEY))


def call_below_observer(op: OpOverload, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op from the observer's kernel; the observer stays on for the ops that it is composed of."""
    return _find("torch._ops.OpOverload.redispatch")(op, keys & _keys_below_observer(), *args, **kwargs)


@cache
def _observer_key() -> Any:
    return _find("torch._C._parse_dispatch_key")(OBSERVER_KEY)


@cache
def _key_set(*names: str) -> Any:
    return reduce(or_, map(_find("torch._C.DispatchKeySet"), map(_find("torch._C._parse_dispatch_key"), names)))


@cache
def _keys_below_observer() -> Any:
    return _find("torch._C._dispatch_keyset_full_after")(_observer_key())


def _guard(kind: str, keys: Any) -> AbstractContextManager[None]:
    return cast(AbstractContextManager[None], _find(f"torch._C._{kind}DispatchKeyGuard")(keys))


def script_line() -> tuple[str, int] | None:
    """Return file (after `torch.jit.load`, in its archive) and line of this thread's innermost TorchScript frame."""
    traceback = _find("torch._C._profiler.gather_traceback")(python=False, script=True, cpp=False)
    frames = _find("torch._C._profiler.symbolize_tracebacks")([traceback])[0]
    return next(((frame["filename"], frame["line"]) for frame in frames if frame["line"]), None)


schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
"""Returns an op's name, arguments and defaults."""


# Autocast


@contextmanager
def kernel_library(namespace: str) -> Iterator[Library]:
    """Yield a library to register kernels with, process-wide; they are removed when the context closes."""
    library = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    try:
        yield library
    finally:
        _find("torch.library.Library._destroy")(library)


@contextmanager
def registered(kernels: Iterable[tuple[str, str, Callable[..., Any]]], **options: Any) -> Iterator[None]:
    """Register kernels in this context, process-wide; each has an op ("aten::mm.out") and a dispatch key before it."""
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # The dispatcher warns that a device's own list is overridden, which is the purpose.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            libraries: dict[str, Library] = {}
            for op, key, kernel in kernels:
                namespace, _, name = op.partition("::")
                if namespace not in libraries:
                    libraries[namespace] = stack.enter_context(kernel_library(namespace))
                libraries[namespace].impl(name, kernel, key, **options)  # type: ignore[no-untyped-call]
        yield


def find_op(name: str) -> OpOverload | None:
    """Return the op of a qualified name ("aten::mm.out"); None if this torch lacks it."""
    namespace, _, name = name.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def list_ops(key: str) -> list[str]:
    """Return the qualified names ("aten::mm.out") of the ops with a kernel for a dispatch key; of all ops for ""."""
    return list(_find("torch._C._dispatch_get_registrations_for_dispatch_key")(key))


def without_autocast() -> AbstractContextManager[None]:
    """Return a context in which neither the CPU's nor CUDA's autocast casts any op of this thread."""
    return _guard("Exclude", _key_set("AutocastCPU", "AutocastCUDA"))


def decompose(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as torch's own decomposition into other ops."""
    return _find("torch._ops.OpOverload.decompose")(op, *args, **kwargs)


set_jit_autocast: Callable[[bool], bool] = _find("torch._C._jit_set_autocast_mode")
"""Switches TorchScript's own autocast pass, whose op lists differ, process-wide; returns how it was switched before."""


is_enabled: Callable[[torch.autocast], bool] = attrgetter("_enabled")
"""Returns the `enabled` flag of an autocast region."""


def set_enabled(region: torch.autocast, enabled: bool) -> None:
    """Set the flag of an autocast region after its creation, when it no longer checks for the device."""
    region._enabled = enabled


def fsdp_policy(module: nn.Module) -> Any:
    """Return the FSDP2 MixedPrecisionPolicy of a module; None if it has none, or this torch stores it elsewhere."""
    read = getattr(type(module), "_get_fsdp_state", None)  # not of the module: its own __getattr__ may raise anything
    return None if read is None else getattr(read(module), "_mp_policy", None)


def shard_offset(tensor: Any) -> list[int]:
    """Return the indices of the first element of this rank's part of a DTensor in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as locate  # noqa: PLC0415

    return list(locate(tensor.shape, tensor.device_mesh, tensor.placements)[1])


# Tensors and containers


def version_of(tensor: Tensor) -> int | None:
    """Return how often the tensor was written to in place; None for an inference tensor, which has no counter."""
    return None if tensor.is_inference() else tensor._version


is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Returns True if autograd tracks the tensor as a view of another."""


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the stored values of a sparse tensor; duplicates are not summed."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def tree_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in a nested container."""
    return [tree] if isinstance(tree, Tensor) else [part for _, part in walk(tree) if isinstance(part, Tensor)]


def infinity_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, with a few kernel launches for all of them."""
    return list(torch._foreach_norm(list(tensors), float("inf")))


passing_autograd: Callable[[], AbstractContextManager[None]] = partial(_find("torch._C._InferenceMode"), True)
"""The C++ `torch.inference_mode()`: the Python one costs as much as concatenating a few tensors."""
flatten: Callable[[Sequence[Tensor]], Tensor] = _find("torch._utils._flatten_dense_tensors")
"""Returns all elements of the tensors as one 1-D tensor."""
copy_tensors: Callable[[list[Tensor], list[Tensor]], object] = _find("torch._foreach_copy_")
"""Copies each source, the second list, into its target."""


def print_options() -> dict[str, Any]:
    """Return the current print options as keyword arguments of `torch.set_printoptions`."""
    return dict(vars(_find("torch._tensor_str.PRINT_OPTS")))


def storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's memory, whether it was written to or not; valid as long as the memory is held."""
    return int(tensor.untyped_storage()._cdata)


is_wrapped: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor")
"""Returns True for the wrapper that `torch.vmap` or `torch.func.grad` passes to a function instead of a tensor."""


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of `torch.vmap` and `torch.func.grad`; the tensor itself without any."""
    while is_wrapped(tensor):
        tensor = _find("torch._C._functorch.get_unwrapped")(tensor)
    return tensor


def answers_itself(tensor: Tensor) -> bool:
    """Return True if the tensor's class (masked, fake, fp8) handles each op itself, and so may reject any of ours."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


is_transforming: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
"""Returns True if this thread is inside `torch.vmap`, `torch.func.grad` or a similar transform."""


def find_compiler() -> object:
    """Return what compiles each function that this thread calls now; None or False without a compiler.

    Before torch 2.6 it could only be exchanged.
    """
    frames = _find("torch._C._dynamo.eval_frame")
    if TORCH >= (2, 6):
        return frames.get_eval_frame_callback()
    found = frames.set_eval_frame(None)
    frames.set_eval_frame(found)
    return found


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly: a graph would skip hooks, or be traced through them."""
    is_compiling = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing it takes seconds
    return torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()


def outside_transforms() -> AbstractContextManager[None]:
    """Return a context in which results can leave the `torch.func` transform that this thread is inside."""
    return cast(AbstractContextManager[None], _find("torch._C._DisableFuncTorch")())


@contextmanager
def plain_torch() -> Iterator[None]:
    """Read tensors directly in this context, without function modes, torch.func transforms or the op tracer."""
    with _find("torch._C.DisableTorchFunction")(), outside_transforms(), unobserved():
        yield


def no_subclass_methods() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses are handled as plain tensors, without their `__torch_function__`."""
    return cast(AbstractContextManager[None], _find("torch._C.DisableTorchFunctionSubclass")())


# Modules and autograd


buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The dict of a module's own buffers; unlike `named_buffers` it includes those that are None, and can be written."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The dict of a module's own parameters."""


def loads_plainly(module: nn.Module) -> bool:
    """Return True if `load_state_dict` only copies this module's tensors: without its own method, and without hooks."""
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict and not any(hooks)


def is_running_norm(module: nn.Module) -> bool:
    """Return True for a BatchNorm or InstanceNorm, or a class derived from one."""
    return isinstance(module, _find("torch.nn.modules.batchnorm._NormBase"))


backward_under_way: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""Returns the number of the backward pass that this thread is in; -1 outside of one."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter("_compiled_call_impl")
"""Returns what a module that was compiled in place runs instead of its forward; None if it was not."""


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make the module run `call` instead of its forward."""
    module._compiled_call_impl = call


def run_backward_in_modes(loss: Tensor) -> None:
    """Run the backward pass of a scalar under the active function modes, which a plain `backward()` suspends."""
    run = _find("torch.autograd.graph._engine_run_backward")
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_custom_node(node: Any) -> bool:
    """Return True if a graph node belongs to a `torch.autograd.Function` written in Python."""
    return isinstance(node, _find("torch.autograd.function.BackwardCFunction"))


def running_node() -> int | None:
    """Return the number of the graph node whose backward this thread runs, in their order of creation, or None."""
    node = _find("torch._C._current_autograd_node")()
    return None if node is None or is_custom_node(node) else cast(int, node._sequence_nr())


def num_nodes_made() -> int:
    """Return how many graph nodes this thread has made so far: the number of the next one."""
    return cast(int, _find("torch.autograd._get_sequence_nr")())


def function_backward(node: Any) -> Callable[..., Any]:
    """Return the `backward` or `vjp` that the user wrote for a custom node."""
    function = node._forward_cls
    is_vjp = function.vjp is not torch.autograd.Function.vjp
    return cast(Callable[..., Any], function.vjp if is_vjp else function.backward)


def replace_function_backward(
    node: Any, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Make one custom node run `replacement(backward)`, but no other of its class; return a function to undo it."""
    function = node._forward_cls
    backward = replacement(function_backward(node))
    node._forward_cls = SimpleNamespace(backward=backward, vjp=torch.autograd.Function.vjp, jvp=function.jvp)
    return partial(delattr, node, "_forward_cls")


def read_loss_scale(scaler: Any) -> tuple[Tensor | None, int | None]:
    """Return a GradScaler's scale on its device, which `get_scale()` would wait for, and how often it was updated."""
    if isinstance(scale := getattr(scaler, "_scale", None), Tensor):
        return scale.detach().clone(), version_of(scale)
    if (first := getattr(scaler, "_init_scale", None)) is None and isinstance(scaler, torch.amp.GradScaler):
        return torch.tensor(scaler.get_scale()), None
    return (None, None) if first is None else (torch.tensor(float(first)), 0)
