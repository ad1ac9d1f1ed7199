"""The code that a step comes from: what it imports and what it sets in torch are in force only while it is open.

A training script is imported for what it defines, up to the place where it begins to train: without
`if __name__ == "__main__":` it would train again whenever a replay takes the model's class from it. One that reads
its arguments on the way gets those of the recorded training, or none, and never nandoctor's; where it ends for want of
them, what it has defined by then is there.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from operator import attrgetter, is_
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nandoctor import torch_compat
from nandoctor.dumps.dump import Dump
from nandoctor.errors import NanDoctorError
from nandoctor.machine import bounded_memory, private_memory
from nandoctor.process_wide import generators_kept, held, is_forked
from nandoctor.source_files import is_installed


def read_torch_settings() -> dict[str, Any]:
    """Every setting, as this thread has it now."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def write_torch_settings(settings: Mapping[str, Any]) -> None:
    """Set what differs from `settings`."""
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)


def _write_device(device: torch.device) -> None:
    # Where nobody had set one torch tells "cpu", and to set that would put a mode in the way of every call.
    torch.set_default_device(None if device.type == "cpu" else device)


def _flushes_denormals() -> bool:
    """Torch can set this and not tell it: the smallest normal double, halved, is subnormal, for Python as for torch."""
    return sys.float_info.min / 2 == 0


def _read_autocast() -> tuple[Any, ...]:
    states = ((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda"))
    return (*states, torch.is_autocast_cache_enabled())


def _write_autocast(setting: tuple[Any, ...]) -> None:
    *states, caches = setting
    for name, (enabled, dtype) in zip(("cpu", "cuda"), states, strict=True):
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(caches)


def _read_products() -> tuple[str | None, ...]:
    return (_read_legacy_products(), *(attrgetter(place)(torch.backends).fp32_precision for place in _FP32_PRODUCTS))


def _read_legacy_products() -> str | None:
    # torch refuses to read the old setting where both are in use:
    # https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _write_products(setting: tuple[str | None, ...]) -> None:
    legacy, *precisions = setting
    if legacy is not None and legacy != _read_legacy_products():  # which changes some of the others
        torch.set_float32_matmul_precision(legacy)
    for place, precision in zip(_FP32_PRODUCTS, precisions, strict=True):
        backend = attrgetter(place)(torch.backends)
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_FP32_PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_CUDA = torch.backends.cuda
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _write_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_read_autocast, _write_autocast),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda setting: torch.use_deterministic_algorithms(setting[0], warn_only=setting[1]),
    ),
    "anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda setting: torch.set_anomaly_enabled(*setting),
    ),
    "flushed denormals": (_flushes_denormals, torch.set_flush_denormal),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision of fp32 products": (_read_products, _write_products),
    "cuDNN": _of(torch.backends.cudnn, "enabled"),
    "cuDNN's search": _of(torch.backends.cudnn, "benchmark"),
    "deterministic cuDNN": _of(torch.backends.cudnn, "deterministic"),
    "oneDNN": _of(torch.backends.mkldnn, "enabled"),
    "flash attention": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient attention": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "attention by reference math": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "print options": (
        torch_compat.print_options,
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]
    ),
}

_OF_THE_REPLAY = {"gradients": True, "anomaly detection": (False, True)}
"""What a replay needs whatever the user has set: anomaly detection raises at the NaN whose gradient is looked for."""


# The import path, the loaded modules, torch's settings, its kernels and the generators belong to the process, so the
# code of one project runs at a time: replays in several threads wait for each other.
_lock = threading.RLock()
_open_projects: list[Project] = []
_has_run = False
_forked_within = False


def _begin_child() -> None:
    """In a forked process: the lock may be held by a thread that is not here, and its replay will not end.

    The threads that torch computed with are not here either, and to wait for one hangs
    (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378): after a replay in the parent, its child has one thread.
    """
    global _lock, _forked_within  # noqa: PLW0603
    _lock = threading.RLock()
    _forked_within = _forked_within or bool(_open_projects)
    if _has_run:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)

# They stay whatever a folder holds: the program that is running, and this package.
_NEVER_HIDDEN = frozenset({"__main__", "__mp_main__", "nandoctor"})

_Stamp = tuple[int, int] | None
"""When a file was written, in ns, and its size; None for a module without one."""

_imported: dict[str, dict[str, tuple[ModuleType, _Stamp]]] = {}
"""Per folder the modules that were imported from it: another project takes them over, as long as no file has changed.

Many registries (of layers, of `torch.library` ops) refuse to be given the same class a second time.
"""


def memory_with_threads() -> int | None:
    """`private_memory`, once torch's threads run: libgomp ends a process whose limit forbids the stack of one."""
    if not is_forked():
        torch.ones(1 << 16).sum()  # large enough to be shared among all of them
    return private_memory()


class Project:
    """The imports and torch settings of one step's code; empty for a model that is alive already.

    While it is open its folders are first on `sys.path`, its modules are in `sys.modules`, and torch is set as its code
    had set it when it was imported. Afterwards `sys.path` and torch's settings are as they were, and so is
    `sys.modules`, save for libraries and submodules of packages that were loaded before. Meanwhile the process may have
    `memory_limit` bytes, as `bounded_memory` counts them.
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        self._memory_limit = memory_limit
        self._entries: list[str] = []
        self._modules: dict[str, ModuleType] = {}
        self._settings: dict[str, Any] = {}

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Import and build: what the code sets in torch holds for every run.

        Raises:
            NanDoctorError: this process was forked while a replay was running.
        """
        if _forked_within:
            raise NanDoctorError(
                "This process was forked while a replay was running, and torch is set as that replay had it.",
                remedy="Fork when no replay is running, or start processes by spawn.",
            )
        with _lock:
            before = read_torch_settings()
            with self._open(), generators_kept():
                try:
                    yield
                finally:
                    after = read_torch_settings()
                    changed = {name: value for name, value in after.items() if value != before[name]}
                    self._settings |= {name: value for name, value in changed.items() if name not in _OF_THE_REPLAY}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the step: what the code sets in torch ends with the run, also within another."""
        with _lock:
            settings = read_torch_settings() if self in _open_projects else {}
            with self._open():
                try:
                    yield
                finally:
                    write_torch_settings(settings)

    def files(self, model: nn.Module) -> set[Path]:
        """The user's own files that were imported for the step, and those that define the classes of `model`."""
        classes = {sys.modules.get(type(module).__module__) for module in model.modules()}
        found = {_file_of(module) for module in (*self._modules.values(), *classes)}
        return {file for file in found if file is not None and file.is_file() and not is_installed(file)}

    def enter_folder(self, folder: Path) -> None:
        """Put a folder first on the import path of the project, which is open."""
        entry = str(folder)
        if entry not in self._entries:
            known = _imported.get(entry, {})
            if any(_stamp_of(module) != stamp for module, stamp in known.values()):
                known = _imported[entry] = {}
            _hide_others(folder)
            sys.modules.update({name: module for name, (module, _) in known.items()})
        self._entries = [entry, *(other for other in self._entries if other != entry)]
        sys.path[:] = [entry, *(other for other in sys.path if other != entry)]
        importlib.invalidate_caches()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with _lock:
            if self in _open_projects:
                yield
                return
            global _has_run  # noqa: PLW0603
            _has_run = True
            path, modules, settings = list(sys.path), dict(sys.modules), read_torch_settings()
            writes_no_bytecode = sys.dont_write_bytecode
            _open_projects.append(self)
            try:
                # Python takes a compiled file for that of any source of the same second and size: a fix may be written
                # and taken back within one.
                sys.dont_write_bytecode = True
                sys.path[:] = [*self._entries, *(entry for entry in path if entry not in self._entries)]
                for entry in self._entries:
                    _hide_others(Path(entry))
                sys.modules.update(self._modules)
                write_torch_settings({**self._settings, **_OF_THE_REPLAY})
                if is_forked():
                    torch.set_num_threads(1)  # whatever the code of the project has set
                with bounded_memory(self._memory_limit):
                    yield
            finally:
                _open_projects.remove(self)
                sys.dont_write_bytecode = writes_no_bytecode
                write_torch_settings(settings)
                self._keep_modules(modules)
                self._entries = [entry for entry in sys.path if entry not in path or entry in self._entries]
                sys.path[:] = path

    def _keep_modules(self, before: Mapping[str, ModuleType]) -> None:
        """Take the project's own modules out of `sys.modules`, and put back what they stood in place of."""
        now = dict(sys.modules)
        if list(now) == list(before) and all(map(is_, now.values(), before.values())):
            return
        changed = {name: module for name, module in now.items() if before.get(name) is not module}
        for name, module in changed.items():
            folder = next((entry for entry in self._entries if _is_own(name, module, Path(entry))), None)
            if name in before or (folder is not None and name.partition(".")[0] not in before):
                if folder is not None and self._modules.get(name) is not module:
                    _imported.setdefault(folder, {})[name] = module, _stamp_of(module)
                self._modules[name] = module
                del sys.modules[name]
        for name in before.keys() - sys.modules.keys():
            sys.modules[name] = before[name]


@contextmanager
def in_project() -> Iterator[Project]:
    """The project that this thread has open; one of its own, closed again at the end, where there is none."""
    with _lock:
        project = _open_projects[-1] if _open_projects else Project()
        with project.preparing():
            yield project


def folder_of(name: str) -> Path | None:
    """The folder on the import path that a loaded top-level module came from, None for those from elsewhere."""
    file = _file_of(sys.modules.get(name))
    return None if file is None else file.parent


def _file_of(module: ModuleType | None) -> Path | None:
    """The file of a module, the folder of a package; None for what is built in or makes its attributes up."""
    attributes = getattr(module, "__dict__", {})
    place = next(iter(attributes.get("__path__") or ()), None) or attributes.get("__file__")
    return Path(place) if isinstance(place, str) else None


def _hide_others(folder: Path) -> None:
    """Make way for a folder's modules: the `utils` of one project is not the `utils` of the next."""
    held = {path.name.removesuffix(".py") for path in folder.iterdir()} if folder.is_dir() else set()
    hidden = {name for name in held & sys.modules.keys() if _makes_way(name, folder)}
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]


def _makes_way(name: str, folder: Path) -> bool:
    """Tell whether a module is somebody's own, from another folder; libraries are the same for every project."""
    file = _file_of(sys.modules.get(name))
    return file is not None and name not in _NEVER_HIDDEN and file.parent != folder and not is_installed(file)


def _is_own(name: str, module: ModuleType, folder: Path) -> bool:
    file = _file_of(module)
    if file is None or name.partition(".")[0] in _NEVER_HIDDEN:
        return False
    return file.is_relative_to(folder) and not is_installed(file)


def _stamp_of(module: ModuleType) -> _Stamp:
    try:
        stat = Path(str(module.__file__)).stat()
    except (AttributeError, OSError):
        return None
    return stat.st_mtime_ns, stat.st_size


_importing: ContextVar[bool] = ContextVar("importing", default=False)
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())
stopped: WeakKeyDictionary[ModuleType, BaseException] = WeakKeyDictionary()
"""The modules that were not executed to their end, and what ended them."""


class _TrainingBegins(BaseException):
    """Not to be caught by the script itself."""


@contextmanager
def importing(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module: `stop_import` and an exit of its own end it, and nothing is raised."""
    token = _importing.set(True)
    try:
        with program_arguments(str(module.__file__)):
            yield
    except (_TrainingBegins, SystemExit) as why:
        stopped[module] = why
    finally:
        _importing.reset(token)


@contextmanager
def arguments_of(dump: Dump) -> Iterator[None]:
    """A context in which what is imported gets the command line of the training, if the user's own recorder wrote it.

    A script may read at its top level what it cannot go on without. Anybody else's words are not given to the user's
    code.
    """
    token = _arguments.set(dump.recorded.argv if dump.provenance.own else ())
    try:
        yield
    finally:
        _arguments.reset(token)


def program_arguments(program: str) -> AbstractContextManager[None]:
    """A context in which `sys.argv` is not nandoctor's own; process-wide, under a project's lock."""
    return held((sys, "argv", [program, *_arguments.get()]))


def stop_import() -> None:
    """Called where a training begins: an import for a replay has seen enough."""
    if _importing.get():
        raise _TrainingBegins
