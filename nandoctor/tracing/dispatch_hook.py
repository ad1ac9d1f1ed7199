"""Stands between a model and torch: every op that a thread calls is handed to whoever asked for it."""

from __future__ import annotations

import itertools
import linecache
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nandoctor.evidence.trace import SourceLine
from nandoctor.ops import unread_inputs
from nandoctor.process_wide import Patch, Shared, held, patched
from nandoctor.torch_compat import (
    OBSERVER_KEY,
    call_below_observer,
    is_wrapped,
    kernel_library,
    list_ops,
    observed,
    observer_kernel,
    schema_of,
    script_line,
    script_traceback,
    tree_map,
    unobserved,
    without_observer,
)
from nandoctor.torch_places import HIGHER_ORDER_KEYS, MAKE_SUBCLASS

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_DIMENSIONS = frozenset({"dim", "dims"})


class Signature(NamedTuple):
    """What an op's schema says, read once: torch makes new objects of it each time.

    `name` is the aten name without namespace, overload and the in-place underscore, `add` for `add_.Tensor`; of an op
    with dimensions its family's. `written` are the arguments that the op only writes to, `eps` the default of the one
    of that name.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    eps: float | None
    is_mutable: bool
    is_random: bool


@cache
def signature_of(op: OpOverload) -> Signature:
    """The signature of an op."""
    schema = schema_of(op)
    name = schema.name.partition("::")[2].removesuffix("_nd")
    defaults = (argument.default_value for argument in schema.arguments if argument.name == "eps")
    return Signature(
        name=name if name.startswith("_") else name.rstrip("_"),
        arguments=tuple(argument.name for argument in schema.arguments),
        written=frozenset(argument.name for argument in schema.arguments if argument.is_out),
        eps=next((float(default) for default in defaults if default is not None), None),
        is_mutable=schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """An op and the arguments that it was called with; the call as the code made it, where it was changed since."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original: Invocation | None = None

    @property
    def name(self) -> str:
        """The aten name without namespace, overload and the in-place underscore: `add_.Tensor` is `add`."""
        return signature_of(self.op).name

    @property
    def is_random(self) -> bool:
        """Tell whether the op draws from torch's generator."""
        return signature_of(self.op).is_random

    @property
    def is_mutable(self) -> bool:
        """Tell whether the op writes to one of its arguments."""
        return signature_of(self.op).is_mutable

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """The arguments that were given, by their names in the schema."""
        yield from zip(signature_of(self.op).arguments, self.args, strict=False)
        yield from self.kwargs.items()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the op reads; those of a list are numbered, and what it only writes to is left out."""
        arguments = dict(self.arguments())
        skipped = signature_of(self.op).written.union(unread_inputs(self.name, arguments))
        for name, value in arguments.items():
            if name in skipped:
                continue
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Plain numbers among the arguments, and listed dimensions; the numbers of a list are numbered as well.

        A 0-dim tensor on the CPU is a number that torch wrapped for the user.
        """
        for name, value in self.arguments():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, float(value)
            elif isinstance(value, torch.Tensor) and _is_number(value):
                yield name, float(value.detach())
            elif name in _DIMENSIONS and isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", float(dim)) for i, dim in enumerate(value))
        eps = signature_of(self.op).eps
        if eps is not None and "eps" not in dict(self.arguments()):  # the dispatcher leaves out what equals its default
            yield "eps", eps

    def run(self) -> Any:
        """What the op returns."""
        return self.op(*self.args, **self.kwargs)

    def kept(self) -> Invocation:
        """The same call with the arguments as they are now: copied where the op will write to them."""
        return self.mapped(_copy) if self.is_mutable else self

    def widened(self) -> Invocation:
        """The same call in float64, or complex128: tensors and dtypes both."""
        return self.mapped(_widen)

    def with_argument(self, name: str, value: Any) -> Invocation:
        """The same call with another value for one argument: by its schema's name, or numbered as in `tensors`."""
        listed, _, index = name.partition("[")
        if index:
            items = list(dict(self.arguments())[listed])
            items[int(index[:-1])] = value
            return self.with_argument(listed, items)
        names = signature_of(self.op).arguments[: len(self.args)]
        if name in names:
            place = names.index(name)
            return replace(self, args=(*self.args[:place], value, *self.args[place + 1 :]))
        return replace(self, kwargs={**self.kwargs, name: value})

    def refused_fill(self, error: RuntimeError) -> Invocation | None:
        """The call as it would be with an infinity for the number that `error` says does not fit; None for any other.

        Torch rounds a product or a sum that passes the limit to Inf, and refuses to write such a number itself.
        """
        if "without overflow" not in str(error) or not schema_of(self.op).returns:
            return None
        numbers = (
            (name, value) for name, value in self.arguments() if isinstance(value, float) and math.isfinite(value)
        )
        largest = max(numbers, key=lambda item: abs(item[1]), default=None)
        return None if largest is None else self.with_argument(largest[0], math.copysign(math.inf, largest[1]))

    def mapped(self, change: Any) -> Invocation:
        """The same call with `change` made to every value among the arguments."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


def _is_number(tensor: torch.Tensor) -> bool:
    """Tell whether float() can read it: not a complex number, nor one of many under `torch.vmap`."""
    is_one = tensor.dim() == 0 and tensor.device.type == "cpu"
    return is_one and not tensor.is_complex() and not is_wrapped(tensor)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(_widest(value.dtype))
    return _widest(value) if isinstance(value, torch.dtype) else value


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


Proceed = Callable[[Invocation], Any]
Handler = Callable[[Invocation, Proceed], Any]
"""Takes an op and what runs it, by way of the handlers further in; returns what the op's caller gets."""

# Composites of which one part or the other is to blame; they are on no autocast list themselves.
_LOOKED_INTO = frozenset({"cross_entropy_loss"})
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parent.parent)
# With the separator at its end: torchvision lies beside torch, and is the user's to hear of.
_SKIPPED_ROOTS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), "<frozen", "<eval_with_key>")
# Other words for torch's operations, whose own lines tell no more of a model than torch's do.
_NOTATIONS = frozenset({"einops", "einx", "opt_einsum"})
_MAX_EXPRESSION_LINES = 20
_RUNNER = str(Path(__file__).parent.parent / "replaying" / "runner.py")


class _Handlers(threading.local):
    def __init__(self) -> None:
        self.stack: tuple[Handler, ...] = ()


_handlers = _Handlers()


@contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Hand every op of this thread to `handler`; of two contexts the outer one's is asked first."""
    with observer_registered, held((_handlers, "stack", (*_handlers.stack, handler))), observed():
        yield


def _observe(keys: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if signature_of(op).name in _LOOKED_INTO:
        return call_below_observer(op, keys, *args, **kwargs)
    with unobserved():
        return _hand_on(_handlers.stack, Invocation(op=op, args=args, kwargs=kwargs))


@contextmanager
def _observer() -> Iterator[None]:
    with (
        observer_kernel(_observe),
        patched([Patch(HIGHER_ORDER_KEYS, without_observer), Patch(MAKE_SUBCLASS, _unseen)]),
    ):
        yield


def _unseen(make_subclass: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a parameter in a forward unseen: torch cannot give the tensor that it detaches there another class later."""

    def make_unseen(*args: Any, **kwargs: Any) -> torch.Tensor:
        with unobserved():
            return make_subclass(*args, **kwargs)

    return staticmethod(make_unseen)


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
    while frame is not None and (
        frame.f_code.co_filename.startswith(_SKIPPED_ROOTS)
        or frame.f_globals.get("__name__", "").partition(".")[0] in _NOTATIONS
    ):
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
