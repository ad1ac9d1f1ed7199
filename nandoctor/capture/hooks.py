"""Hooks that report every forward and optimizer step to a recorder, of compiled models too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nandoctor.capture.environment import read_autocast
from nandoctor.errors import NanDoctorError
from nandoctor.process_wide import is_forked, switched
from nandoctor.torch_compat import compiled_call, find_compiler, is_transforming, outside_transforms, set_compiled_call

if TYPE_CHECKING:
    from nandoctor.capture.step import Observer

LOG = logging.getLogger("nandoctor")

Before = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]


class Broadcast:
    """A single global hook for all recorders, which is never removed.

    Torch keeps its global hooks in a dict; a step in one thread fails if another thread adds or removes a hook.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self.listeners: list[Callable[..., Any]] = []
        register(self)

    def add(self, listener: Callable[..., Any]) -> Callable[[], None]:
        """Call `listener` at every step, compiled or not; return a function that removes it."""
        self.listeners.append(listener)
        return partial(self.listeners.remove, listener)

    def __call__(self, *arguments: Any) -> Any:
        """Call all listeners; return the step's changed arguments if a listener changed them, else None."""
        result = None
        for listener in [*self.listeners]:
            if (changed := listener(*arguments)) is not None:
                result, arguments = changed, (arguments[0], *changed)
        return result


BEFORE_UPDATE = Broadcast(register_optimizer_step_pre_hook)
AFTER_UPDATE = Broadcast(register_optimizer_step_post_hook)


class Hook:
    """A function whose errors, except NanDoctorError, are logged once and not raised: the training must go on.

    It runs outside of `torch.func` transforms, since a step may be saved during a forward inside one. In a forked
    process it runs in one thread, since it measures all weights at once even if the training has only small ops. It is
    left out of every compiled graph; if `may_break` is False, it does nothing there, and the graph stays whole. It does
    nothing while `torch.jit.trace` runs. A copied or pickled hook is a function that does nothing: an average of the
    weights is a deep copy of the model, and its forward is not a training step. A pickled one loads without nandoctor.
    """

    def __init__(self, function: Callable[..., Any], *, may_break: bool = True) -> None:
        self._function, self._may_break = function, may_break
        # Every optimizer imports torch's compiler anyway.
        self._uncompiled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; use the wrapper of `disable`, which costs more than the hook, only under a compiler."""
        try:
            if not self._may_break and torch.compiler.is_compiling():
                return None
            # If the compiler gives up on the caller, it still compiles the functions that the caller calls.
            if torch.compiler.is_compiling() or find_compiler():
                return self._uncompiled(*args, **kwargs)
            if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                return None
            if not is_transforming() and not is_forked():
                return self._function(*args, **kwargs)
            # Torch's worker threads do not exist in a fork, and GNU's OpenMP waits for them forever, in any operation
            # on more than some 30,000 elements.
            with outside_transforms(), switched({"num_threads": 1} if is_forked() else {}):
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

    def __deepcopy__(self, _: dict[int, Any]) -> Callable[..., Any]:
        return do_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (sys.audit, "nandoctor")  # it accepts any arguments and, without an audit hook, does nothing


def do_nothing(*_: Any) -> None:
    """Do nothing, as a copied hook does."""


def attach(model: nn.Module, before: Before, after: After, handles: ExitStack) -> None:
    """Call `before` and `after` around each call of the model, and `after` too if it raises an error."""
    compiled: Any = compiled_call(model)
    ahead, behind = Hook(before), Hook(after)
    if compiled is None:
        # Call the methods of Module itself: ScriptModule overrides them to refuse hooks, which a graph cannot hold.
        handles.callback(nn.Module.register_forward_pre_hook(model, ahead, with_kwargs=True).remove)
        handles.callback(nn.Module.register_forward_hook(model, behind, with_kwargs=True, always_call=True).remove)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph between the hooks: those of a model compiled in place would become part of it."""
        output = None
        ahead(model, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
        finally:
            behind(model, args, kwargs, output)
        return output

    set_compiled_call(model, call)
    handles.callback(set_compiled_call, model, compiled)


def scout_autocast(observer: Observer) -> ExitStack:
    """Note the first enabled autocast state that a part of the model trains under; closing the result ends the search.

    Accelerate wraps a model's forward in autocast, which hooks on the model itself do not see.
    """
    handles = ExitStack()

    def look(module: nn.Module, _: Any) -> None:
        state = read_autocast(observer.device.type)
        if module.training and state["enabled"]:
            observer.autocast_inside = state
            handles.close()

    for module in [*observer.model.modules()][1:]:
        if compiled_call(module) is None:
            handles.callback(nn.Module.register_forward_pre_hook(module, Hook(look, may_break=False)).remove)
    return handles
