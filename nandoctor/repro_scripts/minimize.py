"""Slice the tensors of a program by halving, as far as it still fails in the same way.

The same way means: the same kind of value, and fp32 finite if it was.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nandoctor.repro_scripts.program import Program, ValueKind, kinds_of

_MAX_RUNS = 1500
_AT_ONCE = (3, 2, 1)
"""How many dimensions of equal size are sliced together, after all of them."""

Dimension = tuple[str, int]
"""A leaf and one of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a program fails: the worst kind of value in its results, and whether fp32 without rounding is finite."""

    kind: ValueKind
    finite_in_fp32: bool

    def is_shown_by(self, program: Program) -> bool:
        """Return True if the program fails in this way; False if it raises."""
        try:
            return self.kind in kinds_of(program.run()) and self.finite_in_fp32 == (not kinds_of(program.run_in_fp32()))
        except Exception:  # mismatched shapes raise any exception of the op
            return False


def find_failure(program: Program) -> Failure | None:
    """Return how the program fails, None if it is finite."""
    kinds = kinds_of(program.run())
    return Failure(kind=kinds[0], finite_in_fp32=not kinds_of(program.run_in_fp32())) if kinds else None


def shrink(program: Program, failure: Failure) -> Program:
    """Return the program with its tensors sliced as far as `failure` persists, or the number of runs allows."""
    runs, before = itertools.count(), None

    def still_fails(smaller: Program) -> bool:
        return next(runs) < _MAX_RUNS and failure.is_shown_by(smaller)

    while before != (before := sum(leaf.numel() for leaf in program.leaves.values())):
        for slots in [*_groups(program)]:
            if len({program.leaves[name].shape[dim] for name, dim in slots}) == 1:
                program = _narrow(program, slots, still_fails)
    return program


def _narrow(program: Program, slots: tuple[Dimension, ...], still_fails: Callable[[Program], bool]) -> Program:
    """Cut the dimensions `slots` together, at either end: by half while the failure persists, then by less."""
    width = _extent(program, slots) // 2
    while width > 0:
        shorter = next(filter(still_fails, _cut(program, slots, width)), None)
        program = program if shorter is None else shorter
        width = width // 2 if shorter is None else min(width, _extent(program, slots) // 2)
    return program


def _extent(program: Program, slots: tuple[Dimension, ...]) -> int:
    name, dim = slots[0]
    return program.leaves[name].shape[dim]


def _groups(program: Program) -> Iterator[tuple[Dimension, ...]]:
    """Yield groups of dimensions of equal size, which may have to shrink together: all of them, then ever fewer."""
    by_size: dict[int, list[Dimension]] = defaultdict(list)
    for name, leaf in program.leaves.items():
        for dim, size in enumerate(leaf.shape):
            by_size[size].append((name, dim))
    for size, slots in sorted(by_size.items(), reverse=True):
        for count in dict.fromkeys((len(slots), *_AT_ONCE)) if size > 1 else ():
            yield from itertools.combinations(slots, count)


def _cut(program: Program, slots: tuple[Dimension, ...], width: int) -> Iterator[Program]:
    """Yield the program without the first or the last `width` of the dimensions, with sizes among its arguments."""
    size = _extent(program, slots)
    is_named = any(type(value) is int and value == size for value in program.arguments())
    for resized in (program, _with_sizes(program, size, size - width)) if is_named else (program,):
        for start in (width, 0):
            sliced = {name: program.leaves[name] for name, _ in slots}
            for name, dim in slots:
                sliced[name] = sliced[name].narrow(dim, start, size - width)
            yield _with_fitting_gradient(resized.with_values(**sliced))


def _with_fitting_gradient(program: Program) -> Program:
    """Return the program with its gradient cut to the result's shape.

    The gradient of a convolution with strides or without padding has another size than the input.
    """
    if program.gradient is None:
        return program
    gradient = program.leaves[program.gradient]
    try:
        fitting = gradient[tuple(map(slice, program.result().shape))]
    except Exception:  # mismatched shapes raise any exception of the op
        return program
    return program.with_values(**{program.gradient: fitting})


def _with_sizes(program: Program, size: int, new: int) -> Program:
    """Return the program with another size in lists of ints, such as the shape to view as or to normalise over."""

    def resize_lists(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [new if type(item) is int and item == size else item for item in value]

    return replace(
        program,
        args=tuple(map(resize_lists, program.args)),
        kwargs={name: resize_lists(value) for name, value in program.kwargs.items()},
    )
