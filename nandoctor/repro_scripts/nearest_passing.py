"""Find the nearest case that passes: arguments of a program changed as little as possible."""

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

Proposal = tuple[Mapping[str, str], str]
"""Leaves or numbers of a program, each with the expression that replaces it; and the change in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassingCase:
    """A `Proposal` that makes a program pass; `program` is the changed one."""

    changes: Mapping[str, str]
    words: str
    program: Program


def find_passing_case(program: Program) -> PassingCase | None:
    """Return the first case that passes, from raising a constant to appending an element; None if none does."""
    sources = (_numbers, _scalars, _masks, _nonfinite_values, _scales, _floors, _whole_numbers, _rows)
    cases = (_try(program, changes, words) for source in sources for changes, words in source(program))
    return next(filter(None, cases), None)


def _try(program: Program, changes: Mapping[str, str], words: str) -> PassingCase | None:
    """Return the program with its arguments replaced by these expressions of the script; None if it fails."""
    try:
        values = {name: eval(text, {"torch": torch, **program.leaves}) for name, text in changes.items()}
    except (RuntimeError, TypeError):
        return None
    changed = program.with_values(**values)
    return PassingCase(changes=changes, words=words, program=changed) if _passes(changed) else None


def _passes(program: Program) -> bool:
    try:
        return not kinds_of(program.run())
    except Exception:  # an index or a shape that the op rejects
        return False


def _passes_with(program: Program, name: str, template: str, value: float) -> bool:
    """Return True if the program passes with this value in the expression for an argument."""
    return _try(program, {name: template.format(value)}, "") is not None


def _numbers(program: Program) -> Iterator[Proposal]:
    """Propose an eps raised just enough, or a large constant replaced by the largest that the format holds."""
    for name, number in program.numbers.items():
        if abs(number) > LARGEST_EPS:
            largest = math.copysign(torch.finfo(program.low).max, number)
            yield {name: repr(largest)}, "with the largest constant that the format holds"
        elif (value := _least(number, partial(_passes_with, program, name, "{!r}"))) is not None:
            yield {name: repr(value)}, _RAISED


def _scalars(program: Program) -> Iterator[Proposal]:
    """Propose an eps that is a 0-d tensor raised just enough."""
    for name, leaf in program.leaves.items():
        if leaf.dim() == 0 and leaf.is_floating_point() and 0 < abs(leaf) <= LARGEST_EPS:
            template = f"torch.full_like({name}, {{!r}})"
            value = _least(float(leaf), partial(_passes_with, program, name, template))
            if value is not None:
                yield {name: template.format(value)}, _RAISED


def _least(start: float, passes: Callable[[float], bool]) -> float | None:
    """Return the smallest passing multiple of `start`, to two digits or more, up to 1; None if there is none."""
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


def _masks(program: Program) -> Iterator[Proposal]:
    """Propose an open mask that hides no key."""
    for name, leaf in program.leaves.items():
        if leaf.dtype == torch.bool:
            for function in ("zeros_like", "ones_like"):
                yield {name: f"torch.{function}({name})"}, "with the mask opened"
        elif "-inf" in kinds_of((leaf,)):
            yield {name: f"{name}.masked_fill({name}.isneginf(), 0.0)"}, "with the mask opened"


def _nonfinite_values(program: Program) -> Iterator[Proposal]:
    """Propose zeros for the non-finite values in one tensor, else in all of them."""
    nonfinite = [name for name, leaf in program.leaves.items() if kinds_of((leaf,))]
    for names in [*([name] for name in nonfinite), nonfinite] if nonfinite else []:
        yield {name: f"{name}.nan_to_num(0.0, 0.0, 0.0)" for name in names}, "with zeros for the non-finite values"


def _scales(program: Program) -> Iterator[Proposal]:
    """Propose a tensor scaled down just enough."""
    found = []
    for name, leaf in program.leaves.items():
        if not (leaf.is_floating_point() or leaf.is_complex()) or not leaf.any():
            continue
        passes = partial(_passes_with, program, name, f"{name} * {{!r}}")
        factor = next((2.0**-k for k in range(1, _HALVINGS) if passes(2.0**-k)), None)
        if factor is not None and (leaf * factor).any():
            found.append((_bisected(2 * factor, factor, passes), name))
    for factor, name in sorted(found, reverse=True):
        yield {name: f"{name} * {factor!r}"}, f"with {name} scaled down just enough"


def _floors(program: Program) -> Iterator[Proposal]:
    """Propose zeros and negative values raised to the smallest positive number that is enough."""
    for name, leaf in program.leaves.items():
        if not leaf.is_floating_point() or not leaf.numel() or name == program.gradient:
            continue
        floor = _least(1e-8, partial(_passes_above_zero, program, name))
        if floor is not None:
            yield {name: f"{name}.clamp(min={floor!r})"}, f"with {name} kept above zero"


def _passes_above_zero(program: Program, name: str, floor: float) -> bool:
    """Return True if the program passes with a floor that does not round to zero in the leaf's format."""
    raised = program.leaves[name].clamp(min=floor)
    return bool(raised.all()) and _passes(program.with_values(**{name: raised}))


def _whole_numbers(program: Program) -> Iterator[Proposal]:
    """Propose classes that are not ignored, or counts of at least one."""
    for name, leaf in program.leaves.items():
        if not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool):
            yield {name: f"torch.zeros_like({name})"}, f"with {name} that count"
            yield {name: f"{name}.clamp(min=1)"}, f"with {name} of at least 1"


def _rows(program: Program) -> Iterator[Proposal]:
    """Propose one element more along a dimension, for a mean of nothing or a deviation of one element."""
    for name, leaf in program.leaves.items():
        for dim in range(leaf.dim()):
            for more in (f"{name} + 1", f"{name}.new_ones({[max(size, 1) for size in leaf.shape]})"):
                yield {name: f"torch.cat([{name}, {more}], {dim})"}, "with one more element"
