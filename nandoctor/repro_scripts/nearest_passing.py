"""The nearest case that passes: one argument of a program changed, by as little as does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from nandoctor.evidence.formats import LARGEST_EPS
from nandoctor.repro_scripts.program import Program, kinds_of

_HALVINGS = 140
_BISECTIONS = 12
_RAISED = "with the eps raised just enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassingCase:
    """Arguments of the program, each with the expression that takes its place; `program` passes, `words` say how."""

    changes: Mapping[str, str]
    words: str
    program: Program


def mend(program: Program) -> PassingCase | None:
    """The first that passes of: a constant raised, a mask opened, a tensor scaled, its zeros raised, one row more."""
    ways = (_numbers, _scalars, _masks, _nonfinite_values, _scales, _floors, _whole_numbers, _rows)
    return next((found for way in ways for found in way(program)), None)


def _passes(program: Program) -> bool:
    try:
        return not kinds_of(program.run())
    except Exception:  # an index or a shape that the op does not take
        return False


def _numbers(program: Program) -> Iterator[PassingCase]:
    """An eps raised just enough, or a constant made one that the format holds."""
    for name, number in program.numbers.items():
        if abs(number) <= LARGEST_EPS:
            value, words = _least(number, partial(_passes_with_number, program, name)), _RAISED
        else:
            value = math.copysign(torch.finfo(program.low).max, number)
            words = "with the largest constant that the format holds"
        if value is not None and _passes_with_number(program, name, value):
            mended = program.with_numbers(**{name: value})
            yield PassingCase(changes={name: repr(value)}, words=words, program=mended)


def _passes_with_number(program: Program, name: str, number: float) -> bool:
    return _passes(program.with_numbers(**{name: number}))


def _scalars(program: Program) -> Iterator[PassingCase]:
    """An eps that is a tensor of its own raised just enough."""
    for name, leaf in program.leaves.items():
        if leaf.dim() == 0 and leaf.is_floating_point() and 0 < abs(leaf) <= LARGEST_EPS:
            value = _least(float(leaf), partial(_passes_with, program, name, torch.full_like))
            if value is not None:
                yield from _try(program, {name: f"torch.full_like({name}, {value!r})"}, _RAISED)


def _passes_with(
    program: Program, name: str, change: Callable[[torch.Tensor, float], torch.Tensor], strength: float
) -> bool:
    return _passes(program.with_leaves(**{name: change(program.leaves[name], strength)}))


def _least(start: float, passes: Callable[[float], bool]) -> float | None:
    """The smallest multiple of `start`, to two digits, that passes; up to 1."""
    if passes(start):
        return start
    failing = start
    while abs(failing) < 1:
        if passes(2 * failing):
            return _bisected(failing, 2 * failing, passes)
        failing *= 2
    return None


def _bisected(failing: float, passing: float, passes: Callable[[float], bool]) -> float:
    for _ in range(_BISECTIONS):
        middle = math.copysign(math.sqrt(failing * passing), passing)
        failing, passing = (failing, middle) if passes(middle) else (middle, passing)
    for digits in range(2, 9):
        value = float(f"{passing:.{digits}g}")
        if passes(value):
            return value
    return passing


def _masks(program: Program) -> Iterator[PassingCase]:
    """A mask opened: no key is hidden."""
    for name, leaf in program.leaves.items():
        if leaf.dtype == torch.bool:
            for function in ("zeros_like", "ones_like"):
                yield from _try(program, {name: f"torch.{function}({name})"}, "with the mask opened")
        elif "-inf" in kinds_of((leaf,)):
            expression = f"{name}.masked_fill({name}.isneginf(), 0.0)"
            yield from _try(program, {name: expression}, "with the mask opened")


def _nonfinite_values(program: Program) -> Iterator[PassingCase]:
    """Zeros for what is non-finite in one tensor, else in all of them."""
    nonfinite = [name for name, leaf in program.leaves.items() if kinds_of((leaf,))]
    for names in [*([name] for name in nonfinite), nonfinite] if nonfinite else []:
        changes = {name: f"{name}.nan_to_num(0.0, 0.0, 0.0)" for name in names}
        yield from _try(program, changes, "with zeros for the non-finite values")


def _scales(program: Program) -> Iterator[PassingCase]:
    """A tensor scaled down, by as little as does it."""
    found = []
    for name, leaf in program.leaves.items():
        if not (leaf.is_floating_point() or leaf.is_complex()) or not leaf.any():
            continue
        passes = partial(_passes_with, program, name, torch.mul)
        factor = next((2.0**-k for k in range(1, _HALVINGS) if passes(2.0**-k)), None)
        if factor is not None and (leaf * factor).any():
            found.append((_bisected(2 * factor, factor, passes), name))
    for factor, name in sorted(found, reverse=True):
        yield from _try(program, {name: f"{name} * {factor!r}"}, f"with {name} scaled down just enough")


def _floors(program: Program) -> Iterator[PassingCase]:
    """What is zero or negative raised to a positive number, the smallest that does it."""
    for name, leaf in program.leaves.items():
        if not leaf.is_floating_point() or not leaf.numel() or name == program.gradient:
            continue
        floor = _least(1e-8, partial(_passes_above_zero, program, name))
        if floor is not None:
            yield from _try(program, {name: f"{name}.clamp(min={floor!r})"}, f"with {name} kept above zero")


def _passes_above_zero(program: Program, name: str, floor: float) -> bool:
    """Whether a floor does it that the leaf's format tells from zero."""
    raised = program.leaves[name].clamp(min=floor)
    return bool(raised.all()) and _passes(program.with_leaves(**{name: raised}))


def _whole_numbers(program: Program) -> Iterator[PassingCase]:
    """Classes that are not ignored, or counts of at least one."""
    for name, leaf in program.leaves.items():
        if not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool):
            yield from _try(program, {name: f"torch.zeros_like({name})"}, f"with {name} that count")
            yield from _try(program, {name: f"{name}.clamp(min=1)"}, f"with {name} of at least 1")


def _rows(program: Program) -> Iterator[PassingCase]:
    """One element more along a dimension: a mean of nothing, a deviation of one."""
    for name, leaf in program.leaves.items():
        for dim in range(leaf.dim()):
            for more in (f"{name} + 1", f"{name}.new_ones({[max(size, 1) for size in leaf.shape]})"):
                yield from _try(program, {name: f"torch.cat([{name}, {more}], {dim})"}, "with one element more")


def _try(program: Program, changes: Mapping[str, str], words: str) -> Iterator[PassingCase]:
    """The mend, if its expressions, as the script will have them, pass."""
    try:
        values = {name: eval(text, {"torch": torch, **program.leaves}) for name, text in changes.items()}
    except (RuntimeError, TypeError):
        return
    mended = program.with_leaves(**values)
    if _passes(mended):
        yield PassingCase(changes=changes, words=words, program=mended)
