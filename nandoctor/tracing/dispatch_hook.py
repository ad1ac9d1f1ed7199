"""Intercepts every op that a thread calls, and passes it to the handlers that are installed."""

from __future__ import annotations

import itertools
import linecache
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nandoctor.evidence.trace import SourceLine
from nandoctor.ops import canonical, unread_inputs
from nandoctor.process_wide import PerThread, Shared, held, patched
from nandoctor.source_files import is_installed
from nandoctor.torch_compat import (
    HIGHER_ORDER_KEYS,
    MAKE_SUBCLASS,
    OBSERVER_KEY,
    call_below_observer,
    find_op,
    is_wrapped,
    kernel_library,
    list_ops,
    observed,
    registered,
    schema_of,
    script_line,
    unobserved,
    without_observer,
)
from nandoctor.trees import tree_map

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_DIMENSIONS = frozenset({"dim", "dims"})


class Signature(NamedTuple):
    """The parts of an op's schema that are used here, cached because torch rebuilds the objects on each access.

    `name` is the aten name without namespace, overload, in-place underscore and `_nd`: `add` for `add_.Tensor`, and the
    usual one of several: `div` for `true_divide`.
    `written` names the arguments that the op only writes to, `changed` all that it writes to; `eps` is the default of
    the argument of that name. `is_random`: it draws from torch's generator. `is_elementwise`: torch says so of it.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    changed: frozenset[str]
    eps: float | None
    is_mutable: bool
    is_random: bool
    is_elementwise: bool


@cache
def signature_of(op: OpOverload) -> Signature:
    """Return the signature of an op."""
    schema = schema_of(op)
    name = schema.name.partition("::")[2].removesuffix("_nd")
    defaults = (argument.default_value for argument in schema.arguments if argument.name == "eps")
    marked = (it.name for it in schema.arguments if it.alias_info is not None and it.alias_info.is_write)
    statistics = (it.name for it in schema.arguments if it.name.startswith("running_"))  # of a batch norm, not marked
    return Signature(
        name=canonical(name if name.startswith("_") else name.rstrip("_")),
        arguments=tuple(argument.name for argument in schema.arguments),
        written=frozenset(argument.name for argument in schema.arguments if argument.is_out),
        changed=frozenset((*marked, *statistics)),
        eps=next((float(default) for default in defaults if default is not None), None),
        is_mutable=schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_elementwise=torch.Tag.pointwise in op.tags,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """An op and its arguments; `original` is the call as the user's code made it, if a handler has changed it."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original: Invocation | None = None

    @property
    def name(self) -> str:
        """The name in the op's signature."""
        return self.signature.name

    @property
    def signature(self) -> Signature:
        """What is known of the op."""
        return signature_of(self.op)

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments that were given, by their names in the schema."""
        yield from zip(self.signature.arguments, self.args, strict=False)
        yield from self.kwargs.items()

    def argument(self, name: str) -> Any:
        """Return an argument, named as in the schema or as in `tensors`; None if it was not given."""
        listed, _, index = name.rstrip("]").partition("[")
        value: Any = dict(self.arguments()).get(listed)
        return value[int(index)] if index else value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors whose values the op reads, those in a list as `name[i]`; it only writes to the others."""
        arguments = dict(self.arguments())
        skipped = self.signature.written.union(unread_inputs(self.name, arguments))
        for name, value in arguments.items():
            if name in skipped:
                continue
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield the plain numbers among the arguments, and listed dimensions as `name[i]`.

        A 0-dim tensor on the CPU counts as a number: torch wraps the user's numbers like that.
        """
        for name, value in self.arguments():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, float(value)
            elif isinstance(value, torch.Tensor) and _is_number(value):
                yield name, float(value.detach())
            elif name in _DIMENSIONS and isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", float(dim)) for i, dim in enumerate(value))
        eps = self.signature.eps
        if eps is not None and "eps" not in dict(self.arguments()):  # the dispatcher leaves out what equals its default
            yield "eps", eps

    def run(self) -> Any:
        """Run the op and return its output."""
        return self.op(*self.args, **self.kwargs)

    def with_argument(self, name: str, value: Any) -> Invocation:
        """Return the same call with another value for one argument, named as in the schema or as in `tensors`."""
        listed, _, index = name.rstrip("]").partition("[")
        if index:
            items = [*self.argument(listed)]
            items[int(index)] = value
            return self.with_argument(listed, items)
        names = self.signature.arguments[: len(self.args)]
        if name in names:
            place = names.index(name)
            return replace(self, args=(*self.args[:place], value, *self.args[place + 1 :]))
        return replace(self, kwargs={**self.kwargs, name: value})

    def refused_fill(self, error: RuntimeError) -> Invocation | None:
        """Return the call with an infinity for the number that `error` says does not fit; None for any other error.

        Torch rounds a product or sum past the limit to Inf, but raises when it is told to write such a number itself.
        """
        if "without overflow" not in str(error) or not schema_of(self.op).returns:
            return None
        numbers = (
            (name, value) for name, value in self.arguments() if isinstance(value, float) and math.isfinite(value)
        )
        largest = max(numbers, key=lambda item: abs(item[1]), default=None)
        return None if largest is None else self.with_argument(largest[0], math.copysign(math.inf, largest[1]))

    def mapped(self, change: Any) -> Invocation:
        """Return the same call with `change` applied to every value among the arguments."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


def _is_number(tensor: torch.Tensor) -> bool:
    """Return True if float() can read the tensor: 0-dim, on the CPU, not complex and not batched by `torch.vmap`."""
    is_one = tensor.dim() == 0 and tensor.device.type == "cpu"
    return is_one and not tensor.is_complex() and not is_wrapped(tensor)


Proceed = Callable[[Invocation], Any]
Handler = Callable[[Invocation, Proceed], Any]
"""Takes a call and a function that runs it through the inner handlers; returns what the op's caller gets."""

# Composite ops that are on no autocast list themselves. Their parts are observed instead: one of those is to blame.
_LOOKED_INTO = frozenset({"cross_entropy_loss"})
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parent.parent)
# With a trailing separator: torchvision lies beside torch, and its lines are worth reporting.
_SKIPPED_ROOTS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), "<frozen", "<eval_with_key>")
# What torch computes in Python of its own; its other lines only pass arguments on to the op that the user's line names.
_COMPUTING = tuple(str(_PACKAGES[0] / name) for name in ("distributions", "nn/utils", "optim"))
# Notations for torch's ops, whose own lines say no more about a model than torch's do.
_NOTATIONS = frozenset({"einops", "einx", "opt_einsum"})
_MAX_EXPRESSION_LINES = 20
_RUNNERS = tuple(str(Path(__file__).parent.parent / "engine" / file) for file in ("runner.py", "updates.py"))


_handlers = PerThread(stack=())


@contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Pass every op of this thread to `handler` while the context is open; an outer context's handler comes first."""
    with observer_registered, held((_handlers, "stack", (*_handlers.stack, handler))), observed():
        yield


def _observe(keys: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if signature_of(op).name in _LOOKED_INTO:
        return call_below_observer(op, keys, *args, **kwargs)
    with unobserved():
        return _dispatch(_handlers.stack, Invocation(op=op, args=args, kwargs=kwargs))


@contextmanager
def _observer() -> Iterator[None]:
    patches = [(HIGHER_ORDER_KEYS, without_observer), (MAKE_SUBCLASS, _unseen)]
    with kernel_library("_") as library, patched(patches):
        library.fallback(_observe, OBSERVER_KEY, with_keyset=True)  # type: ignore[no-untyped-call]
        yield


def _unseen(make_subclass: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make parameters without the hook: torch cannot change the class of a detached tensor that a hook returned."""

    def make_unseen(*args: Any, **kwargs: Any) -> torch.Tensor:
        with unobserved():
            return make_subclass(*args, **kwargs)

    return staticmethod(make_unseen)


observer_registered = Shared(_observer)
"""Registers the hook with torch, which takes longer than a run of a small model. The hook is idle outside of
`intercepting`, so hold this open across many runs."""


def _observe_named(place: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    op = find_op(place)
    assert op is not None
    # After the library is gone, torch may still call this in place of the fallback, which takes the op as an argument.
    return _observe(keys, op, *(args[1:] if args and args[0] is op else args), **kwargs)


classes_observed = Shared(
    lambda: registered(((op, OBSERVER_KEY, partial(_observe_named, op)) for op in list_ops("")), with_keyset=True)
)
"""Registers the hook so that it also sees ops that a tensor class or a dispatch mode handles itself.

For these torch finds only kernels registered for the very op; registering one for each takes fifty times as long.
"""


def is_unobserved(error: Exception) -> bool:
    """Return True if torch found no kernel of the hook for an op that a tensor class or a mode handles itself."""
    return "func != nullptr INTERNAL ASSERT" in str(error)


def _dispatch(handlers: tuple[Handler, ...], call: Invocation) -> Any:
    if not handlers:
        return call.run()

    def proceed(changed: Invocation) -> Any:
        if changed is not call:
            changed = replace(changed, original=call.original or call)
        return _dispatch(handlers[1:], changed)

    return handlers[0](call, proceed)


class Lines(NamedTuple):
    """The lines that ran an op.

    `source` is that of the innermost frame outside torch, None where only torch's own modules call each other. `inside`
    is one further in, of what torch computes in Python; `called_from` is the user's line if either is a library's.
    """

    source: SourceLine | None
    inside: SourceLine | None
    called_from: SourceLine | None


def find_lines(frame: FrameType | None = None) -> Lines:
    """Return the lines at which this thread is now, or at which `frame` is."""
    frame = frame or sys._getframe(1)
    inside = None
    while frame is not None and _is_skipped(frame):
        if inside is None and frame.f_code.co_filename.startswith(_COMPUTING):
            inside = _line_of(frame)
        frame = _next_frame(frame)
    with_text = frame  # of code that a package made from a string, the nearest frame around it whose code has a text
    while with_text is not None and (_is_skipped(with_text) or _is_without_text(with_text.f_code.co_filename)):
        with_text = _next_frame(with_text)
    frame = with_text or frame
    scripted = script_line()
    source = _line_of(frame) if scripted is None else _line_of_script(*scripted)
    if inside is not None:
        return Lines(source, inside, source)
    caller = frame
    while caller is not None and (_is_skipped(caller) or _is_package(caller.f_code.co_filename)):
        caller = _next_frame(caller)
    return Lines(source, None, _line_of(caller) if caller is not frame else None)


@cache
def _is_without_text(file: str) -> bool:
    return file.startswith("<") and not linecache.getlines(file)


def _next_frame(frame: FrameType) -> FrameType | None:
    """Return the calling frame; those outside the runners belong to nandoctor's caller."""
    return None if frame.f_code.co_filename in _RUNNERS else frame.f_back


def _is_skipped(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return frame.f_code.co_filename.startswith(_SKIPPED_ROOTS) or module in _NOTATIONS


@cache
def _is_package(file: str) -> bool:
    return is_installed(Path(file))


def _line_of_script(file: str, line: int) -> SourceLine | None:
    """Return a line of TorchScript, since the caller's shows another operation; None if its archive has no text."""
    text = linecache.getline(file, line).strip()
    return SourceLine(file=file, line=line, text=text) if text else None


def _line_of(frame: FrameType | None) -> SourceLine | None:
    """Return the line that a frame is at, with the expression if the interpreter keeps columns."""
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    _, end_line, column, end_column = next(positions)
    source = SourceLine(file=file, line=line, text=text, column=column, end_line=end_line, end_column=end_column)
    return replace(source, expression=_read_expression(source))


def _read_expression(source: SourceLine) -> str:
    """Return the source's expression with line breaks and indentation collapsed to spaces; "" if it is unknown."""
    if source.column is None or source.end_line is None or source.end_column is None:
        return ""
    lines = [linecache.getline(source.file, line).encode() for line in range(source.line, source.end_line + 1)]
    if not lines or len(lines) > _MAX_EXPRESSION_LINES:
        return ""
    lines[-1] = lines[-1][: source.end_column]
    lines[0] = lines[0][source.column :]
    return " ".join(b" ".join(lines).decode(errors="replace").split())
