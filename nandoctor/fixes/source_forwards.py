"""The forward of a class in the user's own code, where a module is kept in fp32 by a change of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from torch import nn

from nandoctor.evidence.formats import FP32, FP64
from nandoctor.evidence.trace import ModuleCall
from nandoctor.fixes.widening import is_below
from nandoctor.source_files import is_installed

_POSITION = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Where a forward is written, and the parameters by which it took tensors of low precision, each time."""

    file: str
    line: int
    low: tuple[str, ...]


def find_forward(path: str, model: nn.Module, calls: Sequence[ModuleCall], kept: Set[str]) -> Forward | None:
    """The forward of a module, where it is no library's and every module that has it is among the `kept`.

    A subclass that calls the forward of its class by `super()` has it too, and so has each method of a decorator's.
    None also where a tensor of low precision came in a container, or by a parameter that was no such tensor each time,
    or has a default and may be left out: of `mask=None` there is no `mask.float()`.
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
    """Tell whether a block in the function is left when its call returns, and may say `torch` as the file does."""
    is_suspended = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
    is_suspended = is_suspended or inspect.isasyncgenfunction(function)
    return not is_suspended and "torch" not in (*function.__code__.co_varnames, *function.__code__.co_cellvars)


def _forwards_in(of: type) -> list[CodeType | None]:
    """The code of each forward that a class has or inherits, the overridden ones among them."""
    return [getattr(inspect.unwrap(vars(base).get("forward", base)), "__code__", None) for base in of.__mro__]


def _parameter(path: str, in_order: Sequence[str]) -> str:
    """The parameter that an argument is handed to as a whole; its path where it is in a container or one of `*args`."""
    position = _POSITION.fullmatch(path)
    number = int(position[1]) if position else len(in_order)
    return in_order[number] if number < len(in_order) else path


def _forward_of(module: nn.Module | None) -> FunctionType | None:
    """The function that a class has for its forward, below its decorators; None where the module has one of its own."""
    if module is None or "forward" in vars(module):
        return None
    forward = inspect.unwrap(type(module).forward)
    return forward if type(forward) is FunctionType else None
