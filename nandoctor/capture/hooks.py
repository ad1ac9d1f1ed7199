"""Hooks that tell the recorder of every forward, also of a compiled model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nandoctor.capture.environment import read_autocast
from nandoctor.errors import NanDoctorError
from nandoctor.process_wide import is_forked, one_thread_if_forked
from nandoctor.torch_compat import compiled_call, find_compiler, is_transforming, outside_transforms, set_compiled_call

LOG = logging.getLogger("nandoctor")

Before = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
Found = Callable[[dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]


class Broadcast:
    """One hook of torch's own for all recorders, which is never taken off again.

    Torch keeps its global hooks in a dict, and fails in one thread's step where another thread adds or removes one.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._register = cache(lambda: register(self))
        self.listeners: tuple[Callable[..., Any], ...] = ()
        self._lock = Lock()

    def add(self, listener: Callable[..., Any]) -> Callable[[], None]:
        """Call `listener` too, until what is returned is called; also in a step that is compiled."""
        with self._lock:
            self._register()
            self.listeners += (listener,)
        return lambda: self._remove(listener)

    def _remove(self, listener: Callable[..., Any]) -> None:
        with self._lock:
            self.listeners = tuple(other for other in self.listeners if other is not listener)

    def __call__(self, *given: Any) -> Any:
        """What torch calls; the other arguments of a step, where a listener has put others in their place."""
        answer = None
        for listener in self.listeners:
            if (changed := listener(*given)) is not None:
                answer, given = changed, (given[0], *changed)
        return answer


BEFORE_UPDATE = Broadcast(register_optimizer_step_pre_hook)
AFTER_UPDATE = Broadcast(register_optimizer_step_post_hook)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's `step`, itself first, with the closure as `wrap` makes it; None without any."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrap(closure)}
    return (args[0], wrap(closure), *args[2:]), kwargs


class Hook:
    """A function whose failures are one line in the log: a training must not end by its recorder's fault.

    It runs outside of any `torch.func` transform: a step may be saved at a forward within one. In a forked process it
    runs in one thread: it measures all weights at once, where the training may do with small operations. It is left out
    of any graph, also of one that is compiled later. In a copy, or in a file that the whole model is saved to, it does
    nothing: an average of the weights is a deep copy of the model, and its forward is no step of the training.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # Every optimizer imports torch's compiler anyhow.
        self._left_out = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls; what `disable` puts around a call costs more than the hook, and most compile nothing."""
        try:
            # Where the compiler gives up on a caller, that runs as it is, and all that it calls is compiled.
            if torch.compiler.is_compiling() or find_compiler():
                return self._left_out(*args, **kwargs)
            if not is_transforming() and not is_forked():
                return self._function(*args, **kwargs)
            with outside_transforms(), one_thread_if_forked():
                return self._function(*args, **kwargs)
        except NanDoctorError:
            raise
        except Exception as error:
            if not self._failed:
                LOG.warning(
                    "nandoctor.Recorder failed and may miss steps (%s: %s). Training goes on.",
                    type(error).__name__,
                    error,
                )
            self._failed = True
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (do_nothing,)


def do_nothing(*_: Any) -> None:
    """What a copied hook does."""


def attach(model: nn.Module, before: Before | None, after: After, handles: ExitStack) -> None:
    """Call `before` and `after` around each call of the model."""
    compiled: Any = compiled_call(model)
    ahead, behind = Hook(do_nothing if before is None else before), Hook(after)
    if compiled is None:
        # Module's own methods: a ScriptModule refuses hooks, which its graph could not keep.
        if before is not None:
            handles.callback(nn.Module.register_forward_pre_hook(model, ahead, with_kwargs=True).remove)
        handles.callback(nn.Module.register_forward_hook(model, behind, with_kwargs=True).remove)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        """A model compiled in place has its hooks in the graph; this stands around the graph."""
        ahead(model, args, kwargs)
        output = compiled(*args, **kwargs)
        behind(model, args, kwargs, output)
        return output

    set_compiled_call(model, call)
    handles.callback(set_compiled_call, model, compiled)


def scout_autocast(modules: Iterable[nn.Module], found: Found, device_type: str) -> ExitStack:
    """Tell `found` the first autocast that a module runs under, until the stack closes.

    Accelerate wraps a model's forward in autocast, where hooks on the model itself do not see it.
    """
    handles = ExitStack()

    def look(*_: Any) -> None:
        state = read_autocast(device_type)
        if state["enabled"]:
            found(state)
            handles.close()

    for module in modules:
        if compiled_call(module) is None:
            handles.callback(nn.Module.register_forward_pre_hook(module, Hook(look)).remove)
    return handles
