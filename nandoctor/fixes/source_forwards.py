"""Finds the forward of a class in the user's own code that can be changed to keep a module in fp32."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence, Set
from pathlib import Path
from types import CodeType, FunctionType

from torch import nn

from nandoctor.changes.source_writer import Forward
from nandoctor.evidence.formats import FP32, FP64
from nandoctor.evidence.trace import ModuleCall
from nandoctor.fixes.widening import is_below
from nandoctor.source_files import is_installed

_POSITION = re.compile(r"\[(\d+)\]")


def find_forward(path: str, model: nn.Module, calls: Sequence[ModuleCall], kept: Set[str]) -> Forward | None:
    """Return the forward of a module, if it is not a library's and every module with this forward is among the `kept`.

    A subclass that calls its base's forward by `super()` has this forward too, and so has each method that the same
    decorator wraps. None also if a low-precision tensor came in a container, or in a parameter that was not a tensor in
    every call or has a default: with `mask=None` there is no `mask.float()`.
    """
    modules = dict(model.named_modules())
    function = _forward_of(modules.get(path))
    if function is None or not _can_be_in_block(function) or is_installed(Path(function.__code__.co_filename)):
        return None
    sharing = {name for name, module in modules.items() if function.__code__ in _forwards_in(type(module))}
    if not all(any(is_below(name, other) for other in kept) for name in sharing):
        return None
    parameters = [*inspect.signature(function).parameters.values()][1:]
    in_order = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    narrow, always = set[str](), {one.name for one in parameters if one.default is one.empty}
    for call in (call for call in calls if call.module in sharing):
        taken = {_parameter(stats.path, in_order): stats.dtype for stats in call.inputs}
        narrow.update(name for name, dtype in taken.items() if dtype not in (FP32, FP64))
        always &= taken.keys()
    if not narrow <= always:
        return None
    low = tuple(one.name for one in parameters if one.name in narrow)
    return Forward(file=function.__code__.co_filename, line=function.__code__.co_firstlineno, low=low)


def _can_be_in_block(function: FunctionType) -> bool:
    """Return True if a block in the function ends when the call returns, and `torch` is no local name in it."""
    is_suspended = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
    is_suspended = is_suspended or inspect.isasyncgenfunction(function)
    return not is_suspended and "torch" not in (*function.__code__.co_varnames, *function.__code__.co_cellvars)


def _forwards_in(of: type) -> list[CodeType | None]:
    """Return the code of each forward that a class has or inherits, including overridden ones."""
    return [getattr(inspect.unwrap(vars(base).get("forward", base)), "__code__", None) for base in of.__mro__]


def _parameter(path: str, in_order: Sequence[str]) -> str:
    """Return the parameter that an argument is passed to as a whole; its path if it is in a container or `*args`."""
    position = _POSITION.fullmatch(path)
    number = int(position[1]) if position else len(in_order)
    return in_order[number] if number < len(in_order) else path


def _forward_of(module: nn.Module | None) -> FunctionType | None:
    """Return the class's forward function without its decorators; None if the module overrides it, or has no source."""
    if module is None or "forward" in vars(module):
        return None
    # A scripted class has a descriptor that raises in place of the function.
    forward = inspect.unwrap(inspect.getattr_static(type(module), "forward"))
    return forward if type(forward) is FunctionType else None
