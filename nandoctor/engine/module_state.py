"""A model's state in a run: weights, buffers and gradients, and which are non-finite; kept before it, put back after.

In a large model each gradient is read when the backward pass has completed it, and then freed.

A float64 run draws the same random numbers as an fp32 run, so that it runs the same step. By themselves `randn` and
`rand` take another number of bits from the generator in float64, and everything drawn after them differs. fp16 and bf16
draw what fp32 does, rounded. Dropout draws the same mask in every format.
"""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.autocast.literals import FP32_FOR_HALF, Wider, recast
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.engine.call import Batch
from nandoctor.errors import LossError
from nandoctor.evidence.trace import ModuleCall, TensorStats
from nandoctor.file_memory import cast_to_file, map_empty
from nandoctor.machine import memory_of
from nandoctor.process_wide import switched
from nandoctor.torch_compat import (
    is_running_norm,
    no_subclass_methods,
    plain_torch,
    run_backward_in_modes,
    schema_of,
    storage_of,
    tree_tensors,
)
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting
from nandoctor.tracing.module_tracer import Tracer
from nandoctor.tracing.op_tracer import Known
from nandoctor.tracing.tensor_stats import (
    Reading,
    all_finite,
    collect,
    is_finite,
    measure,
    measure_all,
    numbers_in,
    walk_tensors,
)
from nandoctor.trees import tree_map

LARGE_NBYTES = 256 << 20
"""The size of weights from which on memory counts for more than the time that it takes to save it."""

NEGATIVE, POSITIVE, NAN = 1, 2, 3
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOLDS_NOTHING = frozenset({int, float, str, bool, type(None), FunctionType})
_ATTRIBUTES_FIRST = {"unknown": 0, "weight": 1, "buffer": 2, "unread": 2}


def is_large(model: nn.Module) -> bool:
    """Return True if the model has so many weights on the CPU that saving memory is worth the time."""
    return memory_of([tensor for tensor in model.parameters() if tensor.device.type == "cpu"]) >= LARGE_NBYTES


class EndedEarly(BaseException):
    """A run has shown what was asked of it; code that catches every `Exception` does not catch it."""


def held_by(loss: Callable[..., Any] | None) -> dict[str, Any]:
    """Return what a loss is, is a method of, or reads by name from around it: tensors, and objects with attributes."""
    own = inspect.unwrap(loss) if loss is not None else None
    found = {"": own, "self": getattr(own, "__self__", None)}
    if inspect.isfunction(own):
        with suppress(ValueError):  # a variable around it has no value yet
            around = inspect.getclosurevars(own)
            found |= {**around.globals, **around.nonlocals}
    return {name: it for name, it in found.items() if hasattr(it, "__dict__") and not is_code(it)}


def is_code(value: Any) -> bool:
    """Return True for functions, classes and modules of Python, whose attributes are no state of a model."""
    return inspect.isroutine(value) or isinstance(value, type | ModuleType)


def find_outside(loss: torch.Tensor, model: nn.Module, held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a backward pass gives gradients besides the model's weights, by the names of what is `held`.

    Each has a name of its own, which no weight of the model has either.
    """
    weights = dict(model.named_parameters())
    own, seen, found = set(map(id, weights.values())), set[Any](), dict[int, torch.Tensor]()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in own:
            found[id(leaf)] = leaf
    if not found:
        return {}
    known = {id(tensor): name for _, name, tensor in known_tensors(model, {})}
    for name, value in held.items():
        inside = value.named_parameters() if isinstance(value, nn.Module) else walk_tensors(value)
        known |= {id(tensor): f"{name}.{inner}".strip(".") for inner, tensor in inside}
    named = dict[str, torch.Tensor]()
    for place, leaf in enumerate(found.values(), 1):
        name = known.get(id(leaf), "")
        is_free = name and name not in weights and name not in named
        named[name if is_free else f"{name or 'tensor'} ({place} outside of the model)"] = leaf
    return named


def run_backward(
    parameters: Mapping[str, torch.Tensor],
    loss: torch.Tensor,
    *,
    loss_scale: float,
    keep: bool,
    ends_early: bool,
    large: bool,
) -> tuple[tuple[TensorStats, ...], Mapping[str, torch.Tensor] | None]:
    """Run the backward pass; return the statistics of non-finite parameter gradients, and all gradients if `keep`.

    With `ends_early` it ends at the first of those. The backward pass is that of loss x `loss_scale`, the kept
    gradients are those of the loss itself; in a `large` model they lie in files. `restored` puts back what the model
    had. Raises LossError if the loss has no gradient.
    """
    readings: dict[str, Reading] = {}
    kept: dict[str, torch.Tensor] = {}

    def take(name: str, parameter: torch.Tensor) -> None:
        """Read a gradient when it is complete, and free it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if not all_finite(gradient) and (reading := measure(gradient)) is not None:
            readings[name] = reading
            if ends_early:
                raise EndedEarly
        if keep:
            if loss_scale != 1:
                # In half precision it would be flushed to zero. In place, since new memory costs ten times as much.
                gradient = recast(FP32_FOR_HALF, gradient).div_(loss_scale)
            if name in kept:  # a reentrant checkpoint adds its part separately
                gradient = gradient + kept[name]
            kept[name] = map_empty(gradient.shape, gradient.dtype).copy_(gradient) if large else gradient

    if not loss.requires_grad:
        raise LossError(
            "The loss has no gradient: it does not depend on a weight that is trained.",
            remedy="Return the tensor that training calls backward() on, not .item(), .detach() or a copy of it; "
            "without --loss the forward alone is judged.",
        )
    with ExitStack() as stack:
        for parameter in parameters.values():
            stack.callback(setattr, parameter, "grad", parameter.grad if parameter.is_leaf else None)
            parameter.grad = None
        named = {name: item for name, item in parameters.items() if item.requires_grad and item.is_leaf}
        for name, parameter in named.items() if ends_early or large else ():
            hook = parameter.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
            stack.callback(hook.remove)
        with suppress(EndedEarly):
            run_backward_in_modes(loss * loss_scale)
            with plain_torch():
                for name, parameter in parameters.items():
                    take(name, parameter)
        with plain_torch():
            return collect([(name, readings[name]) for name in parameters if name in readings]), kept if keep else None


def state_of(holder: Any) -> Iterator[Known]:
    """Yield the tensors that a model, or any other object, holds with their kinds and places.

    These are buffers, weights, and what is in the modules' attributes and in containers there, in this order. What
    functions hold is left out.
    """
    modules = _modules_of(holder)
    if isinstance(holder, nn.Module):
        idle = (module for _, module in modules if _writes_only(module))
        unread = {id(buffer) for module in idle for buffer in module.buffers(recurse=False)}
        for name, buffer in holder.named_buffers():
            if not is_lazy(buffer):
                yield "unread" if id(buffer) in unread else "buffer", name, buffer
        yield from (("weight", name, weight) for name, weight in holder.named_parameters() if not is_lazy(weight))
    for path, module in modules:
        values = {name: value for name, value in _attributes_of(module) if type(value) not in _HOLDS_NOTHING}
        for name, tensor in walk_tensors(values, attributes=False) if values else ():
            yield "unknown", f"{path}.{name}".removeprefix("."), tensor


def _modules_of(holder: Any) -> list[tuple[str, Any]]:
    """Return a model's modules with their paths; anything else stands for itself."""
    return list(holder.named_modules()) if isinstance(holder, nn.Module) else [("", holder)]


def _attributes_of(module: Any) -> list[tuple[str, Any]]:
    """Return what a module holds by names of its own."""
    return [(name, value) for name, value in list(vars(module).items()) if name not in _OF_EVERY_MODULE]


def known_tensors(model: nn.Module, batch: Batch) -> list[Known]:
    """Return the tensors that ops get from outside, those of the model and the batch; the last name of one counts."""
    state = sorted(state_of(model), key=lambda known: _ATTRIBUTES_FIRST[known[0]])
    return [*state, *(("batch", name, tensor) for name, tensor in batch.items())]


def with_nonfinite_state(calls: tuple[ModuleCall, ...], modules: Tracer, model: nn.Module) -> tuple[ModuleCall, ...]:
    """Return a run's calls, each with its module's non-finite state, for which every weight is read after a failure."""
    if all(stats.finite for call in calls for stats in (*call.inputs, *call.outputs)):
        return calls
    state: dict[str, tuple[TensorStats, ...]] = {}
    for path, module in model.named_modules():
        buffers = () if _writes_only(module) else module.named_buffers(recurse=False)
        own = (*module.named_parameters(recurse=False), *buffers)
        if found := [(name, tensor) for name, tensor in own if not is_finite(modules.reading_of(tensor))]:
            state[path] = measure_all(found, counts=True)
    return tuple(replace(call, state=state.get(call.module, ())) for call in calls)


def nonfinite_kinds(holder: Any, left_out: Callable[[torch.Tensor], bool] = lambda _: False) -> dict[str, torch.Tensor]:
    """Return, of the tensors in the `state_of` a holder that are not finite, where they hold -inf, +inf and NaN.

    These are 1, 2 and 3. Those that are `left_out` are not read.
    """
    found = dict[str, torch.Tensor]()
    for kind, name, tensor in state_of(holder):
        is_plain = kind != "weight" or type(tensor) is nn.Parameter
        if tensor.is_meta or not is_plain or left_out(tensor) or all_finite(tensor):
            continue
        if (values := numbers_in(tensor)) is not None:
            kinds = NEGATIVE * values.isneginf() + POSITIVE * values.isposinf() + NAN * values.isnan()
            found[name] = kinds.cpu()
    return found


def is_spoilt(kinds: torch.Tensor) -> bool:
    """Return True if there is a NaN, or a +Inf as squares overflow to; a -Inf alone may be a mask's."""
    return bool((kinds > NEGATIVE).any())


def is_new(now: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Return True if one of the kinds of non-finite values that a tensor holds was not there before."""
    return before is None or now.shape != before.shape or bool(((now != before) & (now > 0)).any())


def copied_state(holder: Any) -> dict[str, torch.Tensor]:
    """Return copies of a model's state but weights: tensors, numbers, and how long containers are."""
    held = {name: it for kind, name, it in state_of(holder) if kind != "weight" and is_dense(it)}
    numbers = {name: numbers_in(it) if it.is_floating_point() else it.detach() for name, it in held.items()}
    found = {name: values.clone() for name, values in numbers.items() if values is not None}
    for path, module in _modules_of(holder):
        for name, value in _attributes_of(module):
            is_container = type(value) in _CONTAINERS
            if is_container or type(value) in (int, float, bool):
                found[f"{path}.{name}".removeprefix(".")] = torch.tensor(len(value) if is_container else value)
    return found


def _writes_only(module: nn.Module) -> bool:
    """Return True for a norm layer in train mode, which writes its running statistics and does not read them."""
    return is_running_norm(module) and module.training


def widen_tensors(tensors: Iterable[torch.Tensor], wider: Wider, *, in_files: bool) -> None:
    """Hold a model's tensors in wider formats; `restored` puts their own back. With `in_files` large ones lie in files.

    Half precision is widened as it rounds, so the values stay.
    """
    to = cast_to_file if in_files else torch.Tensor.to
    for tensor in tensors:
        if tensor.dtype in wider and not (is_lazy(tensor) or _is_wrapper(tensor)):
            tensor.data = to(tensor.data, wider[tensor.dtype])


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True for a tensor without numbers of its own: its parts hold the memory."""
    return hasattr(type(tensor), "__tensor_flatten__")


_DRAWING = frozenset(
    "rand randn rand_like randn_like normal normal_functional uniform exponential log_normal cauchy geometric random "
    "bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet".split()
)


def draw_in_fp32(call: Invocation, proceed: Proceed) -> Any:
    """Run an op; if it draws float64 random numbers, draw them in fp32, and cast them."""
    if not call.signature.is_random or call.name not in _DRAWING:
        return proceed(call)
    with switched({"default_dtype": torch.float32}):  # if neither a tensor nor the call names another
        drawn = proceed(call.mapped(partial(recast, {torch.float64: torch.float32})))
    if schema_of(call.op).name.endswith("_"):
        return call.args[0].copy_(drawn)
    return tree_map(partial(recast, {torch.float32: torch.float64}), drawn)


_CONTAINERS = (dict, OrderedDict, list, deque, set)
_WATCHED_NBYTES = 32 << 20
"""Less memory than this is copied faster than every op is watched."""
_SMALL_NBYTES = 1 << 16


@contextmanager
def restored(model: nn.Module, *others: Any) -> Iterator[State]:
    """Restore what the model's code, or the run itself, changes in the model and `others` in this context.

    These are weights and buffers, written in place or replaced, and the modules' attributes, the containers directly in
    these, and the tensors and random generators in either; not state in files' globals, in closures, in caches of
    functions and deeper in objects. An object among `others` is kept as a module is. Small tensors are copied before
    the run; large ones, whose memory may be a mapped file, just before the first write to them.
    """
    state = State((model, *others))
    with no_subclass_methods():  # a subclass's own methods may answer otherwise
        memory = state.keep_tensors()
        if memory.nbytes < _WATCHED_NBYTES:
            memory.keep_all(below=_WATCHED_NBYTES)  # so all of it
        else:
            memory.keep_all(below=_SMALL_NBYTES)
            state.undo.enter_context(intercepting(memory.keep_written))
    try:
        yield state
    finally:
        with no_subclass_methods(), torch.no_grad():
            state.undo.close()


class State:
    """The tensors that modules and other objects hold, each once, and what restores the state, last to first."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.undo = ExitStack()
        self._seen: dict[int, Any] = {}  # with the values, since the id of a deleted one may be reused
        self._waiting = [value for value in held if not isinstance(value, torch.Tensor)]
        self._seen.update((id(value), value) for value in self._waiting)
        for value in held:
            self._keep(value)
        while self._waiting:
            self._keep_attributes(self._waiting.pop())

    def kept_apart(self, output: Any) -> Any:
        """Return a run's output with copies of the tensors in it that are put back, or whose memory is."""

        def is_put_back(value: Any) -> bool:
            if not isinstance(value, torch.Tensor) or not is_dense(value) or is_lazy(value) or _is_wrapper(value):
                return False
            return id(value) in self._seen or self._memory.has(value)

        def copied(value: Any) -> Any:
            return value.detach().clone().requires_grad_(value.requires_grad) if is_put_back(value) else value

        return tree_map(copied, output) if any(is_put_back(it) for _, it in walk_tensors(output)) else output

    def _keep_attributes(self, holder: Any) -> None:
        attributes = dict(vars(holder))
        self.undo.callback(lambda: _put_back(vars(holder), attributes))
        if issubclass(type(holder), nn.Module):  # a lazy one becomes another
            self.undo.callback(object.__setattr__, holder, "__class__", type(holder))
        if isinstance(holder, torch.jit.ScriptModule):  # it keeps its tensors in C++
            for tensor in (*holder.parameters(), *holder.buffers()):
                self._keep(tensor)
        for value in attributes.values():
            self._keep(value)
            if type(value) in _CONTAINERS:
                self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        saved = container.copy()
        self.undo.callback(_put_back, container, saved)
        for value in saved.values() if isinstance(saved, dict) else saved:
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        kind = type(value)  # `isinstance` would ask the value, which may be a proxy
        if issubclass(kind, torch.Tensor):
            self._seen[id(value)] = value
            if _is_wrapper(value):
                self.undo.callback(setattr, value, "grad", value.grad if value.is_leaf else None)
                for name in value.__tensor_flatten__()[0]:
                    self._keep(getattr(value, name))
            else:
                self.tensors.append(value)
        elif issubclass(kind, nn.Module):
            self._seen[id(value)] = value
            self._waiting.append(value)
        elif (undo := _undo_draws(value)) is not None:
            self._seen[id(value)] = value
            self.undo.callback(undo)

    def keep_tensors(self) -> _Memory:
        """Note the tensors as they are, and return their memory, which is still to be copied."""
        strided = [tensor for tensor in self.tensors if tensor.layout is torch.strided and not tensor.is_meta]
        grads = [tensor.grad for tensor in strided if tensor.is_leaf and tensor.grad is not None]
        memory = self._memory = _Memory(it for it in (*strided, *grads) if _has_storage(it))
        for tensor in self.tensors:
            if tensor.layout is not torch.strided:
                self.undo.callback(tensor.copy_, tensor.detach().clone())
        self.undo.callback(memory.put_back)
        for tensor in self.tensors:
            grad = tensor.grad if tensor.is_leaf else None
            self.undo.callback(_put_back_header, tensor, type(tensor), tensor.data, tensor.requires_grad, grad)
        return memory


def _put_back(container: Any, saved: Any) -> None:
    """Give a container its items again, in their order; one that has them is left alone, since a loop may be in it."""
    now, before = (list(chain.from_iterable(it.items()) if isinstance(it, dict) else it) for it in (container, saved))
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    (container.extend if isinstance(saved, (list, deque)) else container.update)(saved)


def _undo_draws(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator of the model's own; None for anything else."""
    kind = type(value)
    if issubclass(kind, (torch.Generator, np.random.RandomState)):
        return partial(value.set_state, value.get_state())
    if kind is random.Random:
        return partial(value.setstate, value.getstate())
    if issubclass(kind, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _put_back_header(
    tensor: torch.Tensor, kind: type, data: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None
) -> None:
    """Give a tensor its attributes again, besides the content of its memory."""
    tensor.data = data
    if type(tensor) is not kind:
        tensor.__class__ = kind
    if tensor.is_leaf:
        if tensor.requires_grad is not requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_lazy(tensor)


class _Memory:
    """The storages of some tensors, each once, and the copies that were made of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flat = {  # as bytes
            storage_of(tensor): torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in tensors
        }
        self.nbytes = sum(flat.numel() for flat in self._flat.values())
        self._copies: dict[int, torch.Tensor] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lies in one of these storages."""
        return _has_storage(tensor) and storage_of(tensor) in self._flat

    def keep_all(self, *, below: int) -> None:
        """Copy every storage of less than `below` bytes in memory."""
        for storage, flat in self._flat.items():
            if flat.numel() < below:
                self._copies[storage] = flat.clone()

    def keep_written(self, call: Invocation, proceed: Proceed) -> Any:
        """Copy what an op writes to first, to a file if it is on the CPU, and run it."""
        written = call.signature.changed
        for name, value in call.arguments() if written else ():
            for tensor in tree_tensors(value) if name in written else ():
                if self.has(tensor) and (storage := storage_of(tensor)) not in self._copies:
                    flat = self._flat[storage]
                    copy = map_empty(flat.shape, flat.dtype).copy_(flat) if flat.is_cpu else flat.clone()
                    self._copies[storage] = copy
        return proceed(call)

    def put_back(self) -> None:
        for storage, copy in self._copies.items():
            memory = self._flat[storage].untyped_storage()
            if memory.nbytes() < copy.numel():
                memory.resize_(copy.numel())
            self._flat[storage].copy_(copy)
