"""Runs the user's code: an exit is an error like any other, and files are kept. What the code raised is explained."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from nandoctor.autocast.policy import Policy
from nandoctor.engine.module_state import run_backward
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.trace import Trace
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import PerThread, Shared, held
from nandoctor.text import brief

NOT_UNDER_AUTOCAST = "unsafe to autocast"
"""What torch says when autocast refuses a loss, which is then computed outside of autocast."""
WRONG_CALL = (TypeError, AttributeError, LookupError, NameError)


class ProcessEndError(RuntimeError):
    """The user's code called `sys.exit` or `os._exit`."""


_inside = PerThread(process=None)
"""`process` is the id of the process in which this thread runs user code, else None; a fork of that may exit."""


@contextmanager
def kept_running() -> Iterator[None]:
    """Make this thread's `sys.exit` and `os._exit` raise while the context is open, and keep the training's files.

    Raises ProcessEndError, with the traceback of the call, if the code inside called one of them.
    """
    try:
        with held((_inside, "process", os.getpid())), _confined:
            yield
    except SystemExit as error:
        ended = ProcessEndError(f"the code ended the process (exit status {error.code})")
        raise ended.with_traceback(error.__traceback__) from error


@contextmanager
def _confine() -> Iterator[None]:
    """Let user code neither end the process nor write to a file of the training: such a write goes nowhere.

    A script that saves a dump when its output is NaN would do so again here, over the dump that is replayed.
    """
    leave, open_file, save = os._exit, builtins.open, torch.save

    @wraps(leave)
    def raise_exit(status: int) -> NoReturn:
        if _is_inside():
            raise SystemExit(status)
        leave(status)

    @wraps(open_file)
    def open_or_discard(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _is_inside() and not {*"wax"}.isdisjoint(mode) and _is_of_training(file):
            file, mode = os.devnull, mode.replace("x", "w")
        return open_file(file, mode, *args, **kwargs)

    @wraps(save)
    def save_or_discard(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not (_is_inside() and isinstance(f, str | os.PathLike)):
            save(obj, f, *args, **kwargs)

    opens = ((builtins, "open", open_or_discard), (io, "open", open_or_discard))
    with held((os, "_exit", raise_exit), *opens, (torch, "save", save_or_discard)):
        yield


_confined = Shared(_confine)


def _is_inside() -> bool:
    return bool(_inside.process == os.getpid())


def _is_of_training(file: Any) -> bool:
    """Return True for a path in the working directory that is not hidden, as those of caches are."""
    try:
        inside = Path(os.fsdecode(file)).resolve().relative_to(Path.cwd())
    except (TypeError, ValueError, OSError):  # a file descriptor, a path elsewhere, a directory that is gone
        return False
    return not any(part.startswith((".", "__")) for part in inside.parts)


def compute_loss(loss: Callable[..., torch.Tensor], *args: Any, device: torch.device) -> torch.Tensor:
    """Return the loss under autocast, or outside of it if CUDA's autocast refuses it, as training must have done."""
    try:
        return loss(*args)
    except RuntimeError as error:
        if NOT_UNDER_AUTOCAST not in str(error):
            raise
    with torch.autocast(device.type, enabled=False):
        return loss(*args)


def is_wrong_call(error: Exception) -> bool:
    """Return True if a module or loss was called with arguments that it cannot take, whatever the tensors' values."""
    if isinstance(error, LossError):
        return isinstance(error.__cause__, (*WRONG_CALL, type(None)))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, TypeError) and frames[-1].f_globals.get("__name__") == nn.Module.__module__


def explains(trace: Trace, error: Exception) -> bool:
    """Return True if earlier non-finite values may be why the forward raised; a -inf that was asked for is a mask."""
    if is_wrong_call(error):
        return False
    calls = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs))
    if not all(stats.finite for stats in (*trace.batch, *calls)):
        return True
    analyses = [op.analysis for op in trace.ops if op.analysis is not None]
    return any(analysis.exact is not None or analysis.kinds != ("-inf",) for analysis in analyses)


def raise_explained(error: Exception, policy: Policy, call: str) -> NoReturn:
    """Raise the error for a `call` that raised under `policy` while all was finite; a LossError as it is."""
    if isinstance(error, LossError):
        raise error
    if is_out_of_memory(error):
        raise explain_memory("run the step", error) from error
    if _lacks_forward(error):
        raise explain_forward() from error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    what = "backward pass" if any(frame.f_code is run_backward.__code__ for frame in frames) else "forward"
    raised = f"The model's {what} raised {type(error).__name__}{raised_at(error)}: {error}"
    if "without overflow" in str(error):
        raise ModelError(
            raised,
            remedy="A number in that line does not fit the format that its tensor has there: take it from "
            "torch.finfo(x.dtype), or compute the line in fp32.",
        ) from error
    compared = bool(policy.wider)
    raise ModelError(
        f"{raised} (in {policy.format}, which nandoctor compares with)" if compared else raised,
        remedy=("Where that line asks for half precision, let it take fp32 too. Else check" if compared else "Check")
        + f" the call, {call}: `nandoctor inspect` lists the saved arrays, --inputs picks among them by name, and "
        "--call names a function (model, batch) -> output for anything else.",
    ) from error


def explain_forward() -> ModelError:
    """Return the error for a model without a forward."""
    return ModelError(
        "The model has no forward.",
        remedy="Name a function that makes the training's call: --call FILE.py:NAME, with def NAME(model, batch): "
        "return model.training_step(batch, 0) or the like; or name the network inside it with --model.",
    )


def _lacks_forward(error: Exception) -> bool:
    """Return True for torch's own error for a module without a forward, or for the arguments that it was given."""
    says_so = isinstance(error, NotImplementedError) and 'required "forward" function' in str(error)
    return says_so or (isinstance(error, TypeError) and "_forward_unimplemented()" in str(error))


def explain_memory(doing: str, error: BaseException) -> ModelError:
    """Return the error for memory that ran out, which is no fault of the user's code."""
    detail = brief(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)
    return ModelError(
        f"There is not enough memory to {doing} ({detail}).",
        remedy="Run it where there is more memory, or on the CPU.",
    )


def explain_import(name: str, error: BaseException) -> ModelError:
    """Return the error for a file or package whose import raised `error`."""
    if is_out_of_memory(error):
        return explain_memory(f"import {name}", error)
    remedy = "It must import without arguments; code that trains on import belongs under `if __name__ == '__main__':`."
    if isinstance(error, ModuleNotFoundError):
        remedy = "Install it where nandoctor runs, or run nandoctor in the folder that the training was started in."
    return ModelError(f"Importing {name} raised {type(error).__name__}{raised_at(error)}: {error}", remedy=remedy)


def is_refusal(error: BaseException) -> bool:
    """Return True if the code itself raised the exception, by `raise` or `assert`, and no operation or call did."""
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    return linecache.getline(frame.f_code.co_filename, number).lstrip().startswith(("raise ", "assert "))


def raised_at(error: BaseException) -> str:
    """Return the last line that `error` came through outside torch, nandoctor and Python, as " at file:line"."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "nandoctor") and package not in sys.stdlib_module_names:
            place = f" at {frame.f_code.co_filename}:{line}"
    return place
