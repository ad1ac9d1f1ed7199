"""Every private part of torch that nandoctor uses, in one place, so that a new torch can be checked against it.

`torch_places.NEEDED` lists the places, and why no public API serves; `check_torch` looks for all of them before a
replay.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.library import Library

from nandoctor.errors import UnsupportedTorchError
from nandoctor.torch_places import NEEDED

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload  # noqa: PLC0414 - exported
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414

TESTED = "2.13"  # the release that the test suite is run on

# The dispatcher asks this key before autocast, autograd and the decomposition of composite ops, so an op is seen there
# once, under the name that the user called. Torch keeps the key for its own tests and gives it no kernels.
OBSERVER_KEY = "TESTING_ONLY_GenericMode"


def check_torch() -> None:
    """Look for everything in `NEEDED`.

    Raises:
        UnsupportedTorchError: the installed torch lacks some of it; all of that is named.
    """
    missing = []
    for place in NEEDED:
        try:
            _find(place)
        except UnsupportedTorchError:
            missing.append(place)
    if missing:
        raise _unsupported(missing)


def look_up(place: str) -> Any:
    """What is at a place of torch now."""
    found, path = cast(Any, torch), "torch"
    for name in place.split(".")[1:]:
        path += f".{name}"
        if not hasattr(found, name):
            with suppress(ImportError):  # a submodule that torch does not import by itself
                importlib.import_module(path)
        if not hasattr(found, name):
            raise _unsupported([place])
        found = getattr(found, name)
    return found


_find = cache(look_up)


def _unsupported(places: Sequence[str]) -> UnsupportedTorchError:
    listed = ", ".join(f"{place} (for {NEEDED[place]})" for place in places)
    return UnsupportedTorchError(
        f"torch {torch.__version__} lacks what nandoctor needs of it: {listed}.",
        remedy=f"nandoctor is tested with torch {TESTED}: install that, or a nandoctor that knows your torch.",
    )


if not TYPE_CHECKING:
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")

# Watching operations


@contextmanager
def observer_kernel(observe: Callable[..., Any]) -> Iterator[None]:
    """Register `observe(keys, op, *args, **kwargs)` for every op that a thread in `observed` calls; process-wide."""
    with kernel_library("_") as library:
        _find("torch.library.Library.fallback")(library, observe, OBSERVER_KEY, with_keyset=True)
        yield


def without_observer(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what finds an operator's keys, so that one without a kernel of the observer's is run as without it."""
    return lambda args, kwargs, keys: compute(args, kwargs, keys.remove(_observer_key()))


def observed() -> AbstractContextManager[None]:
    """A context in which this thread's ops go to the observer's kernel."""
    return _guard("Include", _observer_key())


def unobserved() -> AbstractContextManager[None]:
    """A context whose ops, being nandoctor's own, are not seen by the op tracer."""
    return _guard("Exclude", _observer_keys())


def call_below_observer(op: OpOverload, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op that the observer's kernel was given, with the observer left on for what the op is composed of."""
    return _find("torch._ops.OpOverload.redispatch")(op, keys & _keys_below_observer(), *args, **kwargs)


@cache
def _observer_key() -> Any:
    return _find("torch._C._parse_dispatch_key")(OBSERVER_KEY)


@cache
def _observer_keys() -> Any:
    return _find("torch._C.DispatchKeySet")(_observer_key())


@cache
def _keys_below_observer() -> Any:
    return _find("torch._C._dispatch_keyset_full_after")(_observer_key())


def _guard(kind: str, keys: Any) -> AbstractContextManager[None]:
    return cast(AbstractContextManager[None], _find(f"torch._C._{kind}DispatchKeyGuard")(keys))


def script_traceback() -> object:
    """Where this thread's TorchScript is, if it runs any; for `script_line`, to which it may be given later."""
    return _find("torch._C._profiler.gather_traceback")(python=False, script=True, cpp=False)


def script_line(traceback: object) -> tuple[str, int] | None:
    """The file, in its archive for what `torch.jit.load` read, and the innermost line of TorchScript in a traceback."""
    frames = _find("torch._C._profiler.symbolize_tracebacks")([traceback])[0]
    return next(((frame["filename"], frame["line"]) for frame in frames if frame["line"]), None)


schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
"""The op's name, arguments and defaults."""


# Autocast


@contextmanager
def kernel_library(namespace: str) -> Iterator[Library]:
    """A library to register kernels with, process-wide; they are gone when the context closes."""
    library = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    try:
        yield library
    finally:
        _find("torch.library.Library._destroy")(library)


def list_ops(key: str) -> list[str]:
    """The qualified names, "aten::mm.out", of the ops that have a kernel for a dispatch key; of all ops for ""."""
    return list(_find("torch._C._dispatch_get_registrations_for_dispatch_key")(key))


def without_autocast() -> AbstractContextManager[None]:
    """A context in which no op of this thread is cast by the autocast of the CPU or of CUDA."""
    return _guard("Exclude", _autocast_keys())


@cache
def _autocast_keys() -> Any:
    key_set = _find("torch._C.DispatchKeySet")
    return key_set(_find("torch._C.DispatchKey.AutocastCPU")) | key_set(_find("torch._C.DispatchKey.AutocastCUDA"))


def decompose(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as torch's own sequence of others."""
    return _find("torch._ops.OpOverload.decompose")(op, *args, **kwargs)


def run_default(op: OpOverload, *args: Any) -> Any:
    """Run what an op is on devices without a kernel of their own, where another stands in its place on this one."""
    without_kernels = _find("torch._C._parse_dispatch_key")("IPU")
    return _find("torch._ops.OpOverload.redispatch")(op, _find("torch._C.DispatchKeySet")(without_kernels), *args)


@contextmanager
def without_jit_autocast() -> Iterator[None]:
    """Keep TorchScript's own autocast pass, whose lists differ, out of its graphs; process-wide."""
    set_mode = _find("torch._C._jit_set_autocast_mode")
    before = set_mode(False)
    try:
        yield
    finally:
        set_mode(before)


is_enabled: Callable[[torch.autocast], bool] = attrgetter("_enabled")
"""What an autocast region was told by `enabled=`."""


def set_enabled(region: torch.autocast, enabled: bool) -> None:
    """Tell an autocast region after it was made, when it no longer looks for the device."""
    region._enabled = enabled


def fsdp_policy(module: nn.Module) -> Any:
    """FSDP2's MixedPrecisionPolicy of a module that `fully_shard` was called on, else None; also in another torch."""
    read = getattr(module, "_get_fsdp_state", None)
    return None if read is None else getattr(read(), "_mp_policy", None)


def holds_gradients(module: nn.Module) -> bool:
    """Tell whether FSDP2 holds gradients that `set_requires_gradient_sync(False)` keeps from being summed."""
    read = getattr(module, "_get_fsdp_state", None)
    state = None if read is None else read()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    held = [param for group in groups for param in getattr(group, "fsdp_params", ())]
    grads = [getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in held]
    grads += [getattr(param, "unsharded_accumulated_grad", None) for param in held]  # of another format than these
    return any(grad is not None for grad in grads)


# Tensors and containers


def version_of(tensor: Tensor) -> int | None:
    """How often the tensor was written to in place; None for an inference tensor, for which torch does not count."""
    return None if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The same of many that are no inference tensors."""
    return list(map(attrgetter("_version"), tensors))


is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Tells whether autograd knows the tensor as a view of another."""


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they are stored, duplicates apart."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def rebuild_function(name: str) -> Callable[..., Any]:
    """The function of that name that pickles of torch.save call to make a tensor of a storage."""
    return cast(Callable[..., Any], _find(f"torch._utils.{name}"))


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The nested container with `change` made to every leaf."""
    return _find("torch.utils._pytree.tree_map")(change, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Every leaf of a nested container."""
    return list(_find("torch.utils._pytree.tree_leaves")(tree))


def tree_tensors(tree: Any) -> list[Tensor]:
    """Every tensor in a nested container."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def infinity_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor, in a few launches for all of them."""
    return list(torch._foreach_norm(list(tensors), float("inf")))


passing_autograd: Callable[[], AbstractContextManager[None]] = partial(_find("torch._C._InferenceMode"), True)
"""`torch.inference_mode()` as it is in C++: the one of Python costs as much as joining a few tensors."""
flatten: Callable[[Sequence[Tensor]], Tensor] = _find("torch._utils._flatten_dense_tensors")
"""All elements of a few tensors in one dimension."""
copy_tensors: Callable[[list[Tensor], list[Tensor]], object] = _find("torch._foreach_copy_")
"""Copies each source into its target, which comes first."""


def print_options() -> dict[str, Any]:
    """What `torch.set_printoptions` was given last, by its own keywords."""
    return dict(vars(_find("torch._tensor_str.PRINT_OPTS")))


def storage_of(tensor: Tensor) -> int:
    """What names the memory of a tensor, also where nothing was written to it yet, as long as it is held."""
    return int(tensor.untyped_storage()._cdata)


def count_storage_users(tensor: Tensor) -> int:
    """How many tensors show the memory of this one, itself among them."""
    return int(_find("torch._C._storage_Use_Count")(storage_of(tensor))) - 1


is_wrapped: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor")
"""Tells whether this is what `torch.vmap` or `torch.func.grad` hands to a function in place of a tensor."""


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor under the wrappers of `torch.vmap` and `torch.func.grad`; itself without any."""
    while is_wrapped(tensor):
        tensor = _find("torch._C._functorch.get_unwrapped")(tensor)
    return tensor


def answers_itself(tensor: Tensor) -> bool:
    """Tell whether a class (masked, fake, fp8) decides on each operation, and so may refuse any of ours."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


is_transforming: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
"""Tells whether this thread is inside `torch.vmap`, `torch.func.grad` or their kin."""
find_compiler: Callable[[], object] = _find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
"""What compiles each function that this thread calls now; None or False without any."""


def outside_transforms() -> AbstractContextManager[None]:
    """A context in which results can leave the `torch.vmap`, or its kin, that this thread is inside."""
    return cast(AbstractContextManager[None], _find("torch._C._DisableFuncTorch")())


@contextmanager
def plain_torch() -> Iterator[None]:
    """A context in which tensors are read as they are: no function mode, no torch.func, no op tracer in between."""
    with _find("torch._C.DisableTorchFunction")(), outside_transforms(), unobserved():
        yield


def no_subclass_methods() -> AbstractContextManager[None]:
    """A context in which tensors of a subclass are handled as plain ones, whatever their class makes of a function."""
    return cast(AbstractContextManager[None], _find("torch._C.DisableTorchFunctionSubclass")())


# Modules and autograd


buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The registry of a module's own buffers; `named_buffers` would skip those that are None, and cannot be written."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The registry of a module's own parameters."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The registry of a module's own children."""


def loads_plainly(module: nn.Module) -> bool:
    """Tell whether `load_state_dict` only copies tensors here: no method of the module's own, and no hooks."""
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict and not any(hooks)


def is_running_norm(module: nn.Module) -> bool:
    """Tell whether this is a BatchNorm or InstanceNorm, torch's own or derived from it."""
    return isinstance(module, _find("torch.nn.modules.batchnorm._NormBase"))


backward_under_way: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""The number of the backward pass that this thread is in, -1 for none."""
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter("_compiled_call_impl")
"""What runs in place of the forward of a module that was compiled in place, None where it was not."""


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call` run in place of the module's forward."""
    module._compiled_call_impl = call


def run_backward_in_modes(loss: Tensor) -> None:
    """Run the backward pass of a scalar with the function modes that are on, which a plain `backward()` suspends."""
    run = _find("torch.autograd.graph._engine_run_backward")
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_custom_node(node: Any) -> bool:
    """Tell whether a graph node belongs to a `torch.autograd.Function` written in Python."""
    return isinstance(node, _find("torch.autograd.function.BackwardCFunction"))


def function_backward(node: Any) -> Callable[..., Any]:
    """The `backward`, or `vjp`, that the user wrote for a custom node."""
    function = node._forward_cls
    is_vjp = function.vjp is not torch.autograd.Function.vjp
    return cast(Callable[..., Any], function.vjp if is_vjp else function.backward)


def replace_function_backward(
    node: Any, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Have one custom node run `replacement(backward)`, and no other node of its class; return what undoes it."""
    function = node._forward_cls
    backward = replacement(function_backward(node))
    node._forward_cls = SimpleNamespace(backward=backward, vjp=torch.autograd.Function.vjp, jvp=function.jvp)
    return partial(delattr, node, "_forward_cls")


def read_loss_scale(scaler: Any) -> tuple[Tensor | None, int | None]:
    """A GradScaler's scale on its device, for which `get_scale()` would wait, and the number of its updates, if any."""
    if isinstance(scale := getattr(scaler, "_scale", None), Tensor):
        return scale.detach().clone(), version_of(scale)
    if (first := getattr(scaler, "_init_scale", None)) is None and isinstance(scaler, torch.amp.GradScaler):
        return torch.tensor(scaler.get_scale()), None
    return (None, None) if first is None else (torch.tensor(float(first)), 0)
