"""The forward of a class in the user's own code, where a module is kept in fp32 by a change of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

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

    None also where a tensor of low precision came in a container, or by a parameter that was no such tensor each time.
    """
    modules = dict(model.named_modules())
    function = _forward_of(modules.get(path))
    if function is None or is_installed(Path(function.__code__.co_filename)):
        return None
    sharing = {name for name, module in modules.items() if _forward_of(module) is function}
    if not all(any(is_below(name, other) for other in kept) for name in sharing):
        return None
    parameters = [*inspect.signature(function).parameters.values()][1:]
    in_order = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    narrow, always = set[str](), {one.name for one in parameters}
    for call in (call for call in calls if call.module in sharing):
        taken = {_parameter(stats.path, in_order): stats.dtype for stats in call.inputs}
        narrow.update(name for name, dtype in taken.items() if dtype not in (FP32, FP64))
        always &= taken.keys()
    if not narrow <= always:
        return None
    low = tuple(one.name for one in parameters if one.name in narrow)
    return Forward(file=function.__code__.co_filename, line=function.__code__.co_firstlineno, low=low)


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
