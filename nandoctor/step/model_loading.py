"""Find, build and load the model that a dump belongs to.

A SPEC is `package.module:attr` or `path/to/file.py:attr`.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from nandoctor.dumps.classify import is_extra_state
from nandoctor.dumps.recorded_format import names_object
from nandoctor.engine.user_code import (
    Project,
    explain_import,
    explain_memory,
    folder_of,
    in_project,
    kept_running,
    raised_at,
)
from nandoctor.errors import ModelError
from nandoctor.file_memory import cast_to_file, is_large_tensor
from nandoctor.machine import is_out_of_memory
from nandoctor.source_files import package_of, parse_source
from nandoctor.step.scripts import Script
from nandoctor.text import brief, brief_value, join_first, relative_path
from nandoctor.torch_compat import loads_plainly, storage_of

ModelSource = str | nn.Module | Callable[..., nn.Module]
_State = Mapping[str, torch.Tensor]

_MAX_NAMES_SHOWN = 5
OTHER_ARGUMENTS = (
    "Give the arguments that the training used (--model-arg K=V), or --no-strict to load what fits and leave the rest "
    "as the model initialises it."
)
ARGUMENTS_NEEDED = (
    "Give the arguments it needs with --model-arg K=V, once for each; V may be a Python literal, as in "
    """'cfg={"width": 16}', or an object, as in cfg=train.py:CFG. Relative paths start in the working directory."""
)


def build_model(spec: ModelSource, arguments: Mapping[str, Any], *, directory: Path = Path()) -> nn.Module:
    """Return the Module that `spec` names or builds.

    `spec` is a Module, a Module class, a function that returns a Module, or the SPEC of one of these; paths and
    packages are looked up from `directory`, the working directory by default. A live Module is copied, so the caller's
    stays unchanged.

    Raises:
        ModelError: nothing is found, the code fails on import or call, or the result is not a Module.
    """
    with in_project():
        found = find_attribute(spec, directory=directory)
        name = spec if isinstance(spec, str) else getattr(found, "__qualname__", type(found).__name__)
        if isinstance(found, nn.Module):
            if arguments:
                raise ModelError(
                    f"{name} is a Module already, so it takes no arguments: {', '.join(arguments)}.",
                    remedy="Drop --model-arg, or name the class or a function that builds the model.",
                )
            return _copy(found, name)
        if not callable(found):
            raise ModelError(
                f"{brief_value(spec)} is of type {type(found).__name__}, not a Module or what makes one.",
                remedy="Point --model at the class or function that builds the network.",
            )
        values = {k: find_attribute(v, directory=directory) if names_object(v) else v for k, v in arguments.items()}
        return _call_factory(found, values, name)


def find_attribute(spec: Any, *, directory: Path | None = Path()) -> Any:
    """Return the object that a SPEC names, imported with its folder on the import path; return other objects as is.

    Within `Project.preparing` the folder stays on the project's import path; otherwise it is removed again. Without a
    `directory` the SPEC names an installed package, and no folder is added.

    Raises:
        ModelError: the SPEC is malformed, or nothing is found there.
    """
    if not isinstance(spec, str):
        return spec
    location, separator, attribute = spec.rpartition(":")
    if not separator or not location or not attribute:
        raise ModelError(
            f"{spec!r} does not say where to look and what to take.",
            remedy="Write package.module:attr or path/to/file.py:attr, for example train.py:make_model."
            + _definitions((directory or Path()) / spec),
        )
    with in_project() as project:
        if directory is not None and location.endswith((".py", ".ipynb")):
            value: Any = _import_file(directory / location, project)
        else:
            value = _import_package(location, directory, project)
        for name in attribute.split("."):
            if not hasattr(value, name):
                public = [item for item in dir(value) if not item.startswith("_")]
                raise ModelError(
                    f"{relative_path(location)} has no {attribute!r}.",
                    remedy=_guess(name, public, "Check what stands after the colon.")
                    + _definitions((directory or Path()) / location),
                )
            value = getattr(value, name)
    return value


def _definitions(file: Path) -> str:
    """Return what a file defines at its top level, as a sentence to add; "" for none, or no file."""
    body = getattr(parse_source(file), "body", ())
    names = [it.name for it in body if isinstance(it, ast.ClassDef | ast.FunctionDef)]
    return f" {file.name} defines {join_first(names, _MAX_NAMES_SHOWN)}." if names else ""


def load_state(model: nn.Module, state: _State, *, strict: bool = True, shared: bool = False) -> list[str]:
    """Copy `state` into `model`, whose names `weights.fit_state` has given it, and return notes on what does not fit.

    If they are `shared`, the model's weights use the memory of `state` instead of being copied.

    Raises:
        ModelError: names or shapes disagree and `strict` is set, or nothing fits.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    own = {name: tensor for name, tensor in own.items() if name in state or not is_extra_state(name)}
    state = {**state, **_tied(state, own)}
    left_out, problems = _compare(own, state)
    num_fitting = len(own) - len(left_out)
    if problems and (strict or not num_fitting):
        raise ModelError(
            f"The weights do not fit {type(model).__name__} ({num_fitting} of {len(own)} tensors do):\n"
            + "\n".join(problems),
            remedy=OTHER_ARGUMENTS
            if own.keys() & state.keys()
            else "This is another model's state dict: check --model.",
        )
    loaded = {name: state[name] for name in own if name not in left_out}
    if shared:
        loaded = _share_weights(model, loaded)
        own.clear()  # it holds the initial weights, which nothing else uses any more
    try:
        if loaded:
            model.load_state_dict(loaded, strict=False)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise explain_memory("load the weights", error) from error
        reason = brief(str(error).strip().splitlines()[-1].strip(), 300)
        raise ModelError(
            f"The weights cannot be copied into {type(model).__name__}: {reason}",
            remedy="Save them in the formats that the model has: quantized and sparse weights are not converted.",
        ) from error
    return [f"--no-strict: {problem}" for problem in problems]


def _compare(own: _State, state: _State) -> tuple[set[str], list[str]]:
    """Return the model's names that `state` does not fit, and the problems in words."""
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    known = [name for name in own if name in state and not is_lazy(own[name])]
    reshaped = [name for name in known if own[name].shape != state[name].shape]
    shapes = [f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}" for name in reshaped]
    said = {
        "missing from the weights": missing,
        "not in the model": unexpected,
        "of another shape (weights for model)": shapes,
    }
    shown = ((what, len(names), join_first(names, _MAX_NAMES_SHOWN)) for what, names in said.items() if names)
    problems = [f"  {count} {what}: {listed}" for what, count, listed in shown]
    return {*missing, *reshaped}, problems


def _tied(state: _State, own: _State) -> dict[str, torch.Tensor]:
    """Return the weights that the state has only under the name of a tensor tied to them, as safetensors files do.

    https://huggingface.co/docs/safetensors/torch_shared_tensors
    """
    places = {
        name: (storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        for name, tensor in own.items()
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel()
    }
    given = {place: state[name] for name, place in places.items() if name in state}
    return {name: given[place] for name, place in places.items() if name not in state and place in given}


def _share_weights(model: nn.Module, state: _State) -> dict[str, torch.Tensor]:
    """Point the weights of modules that load plainly to the memory of `state`; return the rest of it, to be copied."""
    left = dict(state)
    waiting = [("", model)] if type(model).load_state_dict is nn.Module.load_state_dict else []
    while waiting:
        prefix, module = waiting.pop()
        if not loads_plainly(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and _can_share(parameter, state[prefix + name]):
                parameter.data = cast_to_file(left.pop(prefix + name).detach(), parameter.dtype)
        waiting += [(f"{prefix}{name}.", child) for name, child in module.named_children()]
    return left


def _can_share(parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
    """Return True if a weight can use the memory of the file's tensor: both are dense, with the same strides."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.layout is tensor.layout is torch.strided
        and parameter.is_floating_point()
        and tensor.is_floating_point()
        and parameter.shape == tensor.shape
        and parameter.stride() == tensor.stride()
    )


def _copy(model: nn.Module, name: str) -> nn.Module:
    def explain(error: Exception) -> ModelError:
        return ModelError(
            f"{name} cannot be copied ({type(error).__name__}: {error}), and the replay must not write to yours.",
            remedy="Pass a function that builds the model instead of the model itself.",
        )

    with _explained(f"copy {name}", explain):
        return copy.deepcopy(model)


def _call_factory(factory: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> nn.Module:
    def explain(error: Exception) -> ModelError:
        signature = "(...)"
        with suppress(TypeError, ValueError):
            signature = str(inspect.signature(factory))
        raised = f"raised {type(error).__name__}{raised_at(error)}: {error}"
        return ModelError(f"{relative_path(name)}{signature} {raised}", remedy=ARGUMENTS_NEEDED)

    with _explained(f"build {name}", explain):
        model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name} returned a {type(model).__name__}, not a Module.",
            remedy="Point --model at a function that returns the network itself.",
        )
    return model


def _import_file(path: Path, project: Project) -> ModuleType:
    if not os.path.isfile(path):  # noqa: PTH113  (False for a name that the system rejects)
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        remedy = _guess(path.name, beside, "Check what stands before the colon.")
        raise ModelError(f"There is no file {relative_path(path)}.", remedy=remedy)
    if path.suffix == ".ipynb":
        shown = relative_path(path)
        raise ModelError(
            f"{shown} is a notebook, and code is taken from Python files.",
            remedy=f"Run `jupyter nbconvert --to script {shlex.quote(shown)}`, and name the .py file that it writes; "
            "or call nandoctor.replay(FILE, model=...) in the notebook itself.",
        )
    path = path.resolve()
    root, name = package_of(path) or (path.parent, _free_name(path))
    if path.stem == "__init__":
        return _import_package(name, root, project)
    project.enter_folder(root)
    if path not in project.scripts:  # run once more, it would make other classes of the same names
        project.scripts[path] = _open_script(path, name, project)
    return project.scripts[path]


def _free_name(path: Path) -> str:
    """Return a file's name as a module's: a file called types.py must not replace Python's own module."""
    name = path.stem
    while name in sys.modules and folder_of(name) != path.parent:
        name += "_"
    return name


def _open_script(path: Path, name: str, project: Project) -> ModuleType:
    """Return the module of a file, in which a statement runs when a name that it binds is asked for."""
    parent, _, last = name.rpartition(".")
    package = _import_package(parent, None, project) if parent else None
    if package is not None and name in sys.modules:  # the package imports it itself
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module, shown = importlib.util.module_from_spec(spec), relative_path(path)
    with _explained(f"import {shown}", partial(explain_import, shown)):
        Script(path, module, project)
    # Registered under its name so that dataclasses, pickling and the file's own imports find it.
    sys.modules[name] = module
    if package is not None:
        setattr(package, last, module)
    return module


def _import_package(name: str, directory: Path | None, project: Project) -> ModuleType:
    if directory is not None:
        project.enter_folder(Path.cwd())  # behind the project's folder, whose settings may name the same package
        project.enter_folder(directory.resolve())
    with _explained(f"import {name}", partial(explain_import, name)), project.as_program(name):
        return importlib.import_module(name)


@contextmanager
def _explained(doing: str, explain: Callable[[Exception], ModelError]) -> Iterator[None]:
    """Raise what the user's code raises in this context as `explain` words it, or as the end of memory."""
    try:
        with kept_running():
            yield
    except ModelError:
        raise
    except Exception as error:
        raise (explain_memory(doing, error) if is_out_of_memory(error) else explain(error)) from error


def _guess(name: str, names: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"Did you mean {near[0]}?" if near else otherwise


_DRAWING = frozenset({"normal_", "uniform_", "kaiming_uniform_"})
_FOLLOWING = frozenset({"mul_", "add_", "clamp_"})


class Unfilled(TorchFunctionMode):
    """A mode for building a large model whose weights all come from a dump: initialisers draw no weight.

    Memory that was never written takes no space.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: set[int] = set()
        self._undrawn: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        target: Any = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and is_large_tensor(target):
            self._weights.add(storage_of(target))  # also reached by `weight.data`
        # Other tensors are drawn: torch.nn.init.trunc_normal_ draws until all values are within its bounds.
        if name in _DRAWING and is_large_tensor(target) and storage_of(target) in self._weights:
            self._undrawn.add(storage_of(target))
            return target
        return target if name in _FOLLOWING and self.holds(target) else func(*args, **kwargs)

    def holds(self, tensor: Any) -> bool:
        """Return True if the tensor was left as it was allocated."""
        return is_large_tensor(tensor) and storage_of(tensor) in self._undrawn
