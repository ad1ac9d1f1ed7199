"""Runs the user's code in its project: imports and settings end with it, an exit is an error, errors are explained."""

from __future__ import annotations

import builtins
import importlib
import io
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from nandoctor.autocast.policy import Policy
from nandoctor.dumps.dump import Dump
from nandoctor.engine.call import dtype_switch
from nandoctor.engine.module_state import run_backward
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.trace import Trace
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import PerThread, Shared, generators_kept, held, is_forked, read_switches, switched
from nandoctor.source_files import is_installed
from nandoctor.text import brief

_OF_THE_REPLAY = {"gradients": True, "anomaly_detection": (False, True)}
"""Settings that a replay overrides: anomaly detection would raise at the NaN gradient that the replay looks for."""


# The import path, the loaded modules, torch's settings and kernels, and the random generators are process-wide, so only
# one project's code runs at a time: replays in several threads wait for each other.
_lock = threading.RLock()
_open_projects: list[Project] = []


@cache
def _use_one_thread_in_forks() -> None:
    """Use one thread in each process that is forked from now on: torch's others do not exist there.

    Waiting for one hangs (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378).
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


# The running program and this package are never replaced by a folder's modules.
_NEVER_UNLOADED = frozenset({"__main__", "__mp_main__", "nandoctor"})

_Stamp = tuple[int, int] | None
"""A file's modification time in ns, and its size; None for a module without a file."""

_imported: dict[str, dict[str, tuple[ModuleType, _Stamp]]] = {}
"""The modules imported from each folder: the next project reuses them unless a file has changed.

Many registries (of layers, of `torch.library` ops) reject a second registration of the same class.
"""


class Project:
    """The imports and torch settings of one step's code; empty for a model that is already built.

    While it is open, its folders come first on `sys.path`, its modules are in `sys.modules`, and torch has the settings
    that its code made on import. Afterwards `sys.path`, torch's settings and `sys.modules` are restored, except that
    libraries and submodules of packages that were loaded before stay loaded. `scripts` are the modules that were
    imported by their files. Its programs are given `arguments`, and its code begins with the `settings`.
    """

    def __init__(self, arguments: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> None:
        self._arguments = arguments
        self.scripts: dict[Path, ModuleType] = {}
        self._entries: list[str] = []
        self._modules: dict[str, ModuleType] = {}
        self._settings = dict(settings or {})

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Import and build in this context; torch settings that the code makes here apply to every run."""
        with _lock:
            before = read_switches()
            with self._open(), generators_kept():
                try:
                    yield
                finally:
                    changed = {name: value for name, value in read_switches().items() if value != before[name]}
                    self._settings |= {name: value for name, value in changed.items() if name not in _OF_THE_REPLAY}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the step in this context; torch settings that the code makes here end with it, even if nested."""
        with _lock, self._open(), switched(read_switches()):
            yield

    def as_program(self, program: str) -> AbstractContextManager[None]:
        """Return a context in which `sys.argv` is the program's, never nandoctor's; the project must be open."""
        return held((sys, "argv", [program, *self._arguments]))

    def files(self, model: nn.Module) -> set[Path]:
        """Return the user's own files that were imported for the step or define the classes of `model`."""
        classes = {sys.modules.get(type(module).__module__) for module in model.modules()}
        found = {_file_of(module) for module in (*self._modules.values(), *classes)}
        return {file for file in found if file is not None and file.is_file() and not is_installed(file)}

    def enter_folder(self, folder: Path) -> None:
        """Put a folder first on the project's import path; the project must be open."""
        entry = str(folder)
        if entry not in self._entries:
            known = _imported.get(entry, {})
            if any(_stamp_of(module) != stamp for module, stamp in known.values()):
                known = _imported[entry] = {}
            _unload_shadowing(folder)
            sys.modules.update({name: module for name, (module, _) in known.items()})
        self._entries = [entry, *(other for other in self._entries if other != entry)]
        sys.path[:] = [entry, *(other for other in sys.path if other != entry)]
        importlib.invalidate_caches()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Open the project in this context, unless it is open already; the caller holds `_lock`."""
        if self in _open_projects:
            yield
            return
        _use_one_thread_in_forks()
        path, modules = list(sys.path), dict(sys.modules)
        _open_projects.append(self)
        try:
            sys.path[:] = [*self._entries, *(entry for entry in path if entry not in self._entries)]
            for entry in self._entries:
                _unload_shadowing(Path(entry))
            sys.modules.update(self._modules)
            # Python reuses bytecode if the source's size and mtime in whole seconds are the same: a fix may be written
            # and reverted within one second.
            with held((sys, "dont_write_bytecode", True)), switched(read_switches() | self._settings | _OF_THE_REPLAY):
                if is_forked():
                    torch.set_num_threads(1)  # whatever the project's code has set
                yield
        finally:
            _open_projects.remove(self)
            self._keep_modules(modules)
            self._entries = [entry for entry in sys.path if entry not in path or entry in self._entries]
            sys.path[:] = path

    def _keep_modules(self, before: Mapping[str, ModuleType]) -> None:
        """Move the project's own modules out of `sys.modules`, and restore the modules that they replaced."""
        changed = {name: module for name, module in dict(sys.modules).items() if before.get(name) is not module}
        # Before any is unloaded, which the files of others depend on.
        files = {name: _own_file(name, module) for name, module in changed.items()}
        for name, module in changed.items():
            file = files[name]
            folder = next((entry for entry in self._entries if file is not None and file.is_relative_to(entry)), None)
            if name in before or (folder is not None and name.partition(".")[0] not in before):
                if folder is not None and self._modules.get(name) is not module:
                    _imported.setdefault(folder, {})[name] = module, _stamp_of(module)
                self._modules[name] = module
                del sys.modules[name]
        for name in before.keys() - sys.modules.keys():
            sys.modules[name] = before[name]


@contextmanager
def in_project() -> Iterator[Project]:
    """Yield the project that this thread has open or, without one, a new project that closes at the end."""
    with _lock:
        project = _open_projects[-1] if _open_projects else Project()
        with project.preparing():
            yield project


def folder_of(name: str) -> Path | None:
    """Return the folder that a loaded top-level module lies in; None if it has no file or is not loaded."""
    file = _file_of(sys.modules.get(name))
    return None if file is None else file.parent


def _file_of(module: ModuleType | None) -> Path | None:
    """Return a module's file or a package's folder, or None; from `__dict__`, as some modules make up attributes."""
    attributes = getattr(module, "__dict__", {})
    try:
        place = next(iter(attributes.get("__path__") or ()), None) or attributes.get("__file__")
    except KeyError:  # a folder without __init__.py looks its package up, which may be unloaded
        return None
    return Path(place) if isinstance(place, str) else None


def _unload_shadowing(folder: Path) -> None:
    """Unload modules that hide the folder's own: the `utils` of one project is not the `utils` of the next."""
    held = {path.name.removesuffix(".py") for path in folder.iterdir()} if folder.is_dir() else set()
    files = {name: _own_file(name, sys.modules[name]) for name in held & sys.modules.keys()}
    hidden = {name for name, file in files.items() if file is not None and file.parent != folder}
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]


def _own_file(name: str, module: ModuleType) -> Path | None:
    """Return the file of a user's module; None for the running program and for libraries, which all projects share."""
    file = _file_of(module)
    is_kept = file is None or name.partition(".")[0] in _NEVER_UNLOADED or is_installed(file)
    return None if is_kept else file


def _stamp_of(module: ModuleType) -> _Stamp:
    try:
        stat = Path(str(module.__file__)).stat()
    except (AttributeError, OSError):
        return None
    return stat.st_mtime_ns, stat.st_size


def project_of(dump: Dump) -> Project:
    """Return a new project for a dump's step, with the training's arguments if the user's own recorder wrote them.

    A script may need its arguments at the top level. Those of anybody else's dump are not given to the user's code.
    """
    return Project(dump.recorded.argv if dump.provenance.own else (), dtype_switch(dump.recorded.built_dtype))


NOT_UNDER_AUTOCAST = "unsafe to autocast"
"""What torch says when autocast refuses a loss, which is then computed outside of autocast."""
NO_GRADIENT = "does not require grad"
"""What torch says when a gradient is asked for with respect to, or of, something that has none."""
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
        f"There is not enough memory to {doing} ({detail}).", remedy="Run it where there is more memory, or on the CPU."
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
