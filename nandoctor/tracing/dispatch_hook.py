"""Stands between a model and torch: every op that a thread calls is handed to whoever asked for it."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nandoctor.evidence.trace import SourceLine
from nandoctor.process_wide import Patch, Shared, patched
from nandoctor.torch_compat import (
    OBSERVER_KEY,
    call_below_observer,
    kernel_library,
    list_ops,
    observed,
    observer_kernel,
    script_line,
    script_traceback,
    unobserved,
    without_observer,
)
from nandoctor.torch_places import HIGHER_ORDER_KEYS
from nandoctor.tracing.op_call import Invocation, signature_of

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

Proceed = Callable[[Invocation], Any]
Handler = Callable[[Invocation, Proceed], Any]
"""Takes an op and what runs it, by way of the handlers further in; returns what the op's caller gets."""

# Composites of which one part or the other is to blame; they are on no autocast list themselves.
_LOOKED_INTO = frozenset({"cross_entropy_loss"})
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parent.parent)
# With the separator at its end: torchvision lies beside torch, and is the user's to hear of.
_SKIPPED_ROOTS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), "<frozen", "<eval_with_key>")
_MAX_EXPRESSION_LINES = 20
_RUNNER = str(Path(__file__).parent.parent / "replaying" / "runner.py")


class _Handlers(threading.local):
    def __init__(self) -> None:
        self.stack: tuple[Handler, ...] = ()


_handlers = _Handlers()


@contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Hand every op of this thread to `handler`; of two contexts the outer one's is asked first."""
    outer = _handlers.stack
    with observer_registered:
        _handlers.stack = (*outer, handler)
        try:
            with observed():
                yield
        finally:
            _handlers.stack = outer


def _observe(keys: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if signature_of(op).name in _LOOKED_INTO:
        return call_below_observer(op, keys, *args, **kwargs)
    with unobserved():
        return _hand_on(_handlers.stack, Invocation(op=op, args=args, kwargs=kwargs))


@contextmanager
def _observer() -> Iterator[None]:
    with observer_kernel(_observe), patched([Patch(HIGHER_ORDER_KEYS, without_observer)]):
        yield


observer_registered = Shared(_observer)
"""Where the hook is known to torch. To register it takes longer than a run of a small model, and it is idle outside of
`intercepting`: whoever makes many runs holds it meanwhile."""


@contextmanager
def _observer_for_each_op() -> Iterator[None]:
    names = [name.partition("::") for name in list_ops("")]
    with ExitStack() as stack:
        libraries = {namespace: stack.enter_context(kernel_library(namespace)) for namespace, _, _ in names}
        for namespace, _, name in names:
            kernel = partial(_observe_named, namespace, name)
            libraries[namespace].impl(name, kernel, OBSERVER_KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        yield


def _observe_named(namespace: str, name: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    # Torch remembers this function when its library is gone, and calls it in the fallback's stead, which takes the op.
    return _observe(keys, op, *(args[1:] if args and args[0] is op else args), **kwargs)


classes_observed = Shared(_observer_for_each_op)
"""Where the hook sees those ops as well that a tensor class or a dispatch mode answers itself.

Torch finds no kernel for these but one that was registered for the very op, which takes fifty times as long.
"""


def is_unobserved(error: Exception) -> bool:
    """Tell whether torch found no kernel of the hook for an op that a tensor class or a dispatch mode answers."""
    return "func != nullptr INTERNAL ASSERT" in str(error)


def _hand_on(handlers: tuple[Handler, ...], call: Invocation) -> Any:
    if not handlers:
        return call.run()

    def proceed(changed: Invocation) -> Any:
        is_same = changed is call
        return _hand_on(handlers[1:], call if is_same else replace(changed, original=call.original or call))

    return handlers[0](call, proceed)


class CallSite(NamedTuple):
    """A frame's code object, the instruction in it that is running, and its line; the TorchScript that it runs, if any.

    There is no code where torch's own modules call each other throughout.
    """

    code: CodeType | None
    instruction: int
    line: int
    script: object


def find_place(frame: FrameType | None = None) -> CallSite:
    """Where the user's innermost frame is."""
    frame = frame or sys._getframe(1)
    script = script_traceback()
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_ROOTS):
        # Further out than the runner is whoever called nandoctor.
        frame = None if frame.f_code.co_filename == _RUNNER else frame.f_back
    if frame is None:
        return CallSite(None, 0, 0, script)
    return CallSite(frame.f_code, frame.f_lasti, frame.f_lineno, script)


def to_source(place: CallSite) -> SourceLine | None:
    """The line of a place, with the expression that it is in where the interpreter keeps columns.

    Where TorchScript runs the line is that of the script, for the caller's shows another operation; None where the
    script is in an archive that `torch.jit.load` read.
    """
    if (scripted := script_line(place.script)) is not None:
        text = linecache.getline(*scripted).strip()
        return SourceLine(file=scripted[0], line=scripted[1], text=text) if text else None
    code, instruction, line, _ = place
    if code is None:
        return None
    text = linecache.getline(code.co_filename, line).strip()
    _, end_line, column, end_column = next(itertools.islice(code.co_positions(), instruction // 2, None))
    source = SourceLine(
        file=code.co_filename, line=line, text=text, column=column, end_line=end_line, end_column=end_column
    )
    return replace(source, expression=_read_expression(source))


def _read_expression(source: SourceLine) -> str:
    """The expression on one line, its line breaks and indentation joined to single spaces; "" where it is unknown."""
    if source.column is None or source.end_line is None or source.end_column is None:
        return ""
    lines = [linecache.getline(source.file, line).encode() for line in range(source.line, source.end_line + 1)]
    if not lines or len(lines) > _MAX_EXPRESSION_LINES:
        return ""
    lines[-1] = lines[-1][: source.end_column]
    lines[0] = lines[0][source.column :]
    return " ".join(b" ".join(lines).decode(errors="replace").split())
