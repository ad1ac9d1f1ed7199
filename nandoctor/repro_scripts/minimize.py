"""Slice the tensors of a program as far as it still fails in the same way.

The same way means: the same kind of value from operands of the same kind, and fp32 and float64 finite if they were.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nandoctor.repro_scripts.program import Program, ValueKind, kinds_of

_MAX_RUNS = 1500
_MAX_SLOTS = 6

Dimension = tuple[str, int]
"""A leaf and one of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a program fails: the worst kind of value in its results, and what distinguishes causes.

    `finite_in_fp32`: it is finite if nothing is rounded on the way. `finite_exactly`: float64 is finite from the last
    op's operands, so it is an overflow and not a division by zero. `taken` is the worst kind of value among those
    operands. `results` are the indexes of the gradients, or of the one result, that have the kind; no others have it.
    """

    kind: ValueKind
    finite_in_fp32: bool
    finite_exactly: bool
    taken: ValueKind | None
    results: frozenset[int]

    def is_shown_by(self, program: Program) -> bool:
        """Return True if the program fails in this way; False if it raises."""
        try:
            found = _find(program, lambda kinds: self.kind if self.kind in kinds else None)
        except Exception:  # mismatched shapes raise any exception of the op
            return False
        return found is not None and found.results <= self.results and replace(found, results=self.results) == self


def find_failure(program: Program) -> Failure | None:
    """Return how the program fails, None if it is finite."""
    return _find(program, lambda kinds: next(iter(kinds), None))


def _find(program: Program, choose: Callable[[tuple[ValueKind, ...]], ValueKind | None]) -> Failure | None:
    made = program.run()
    kind = choose(kinds_of(made))
    if kind is None:
        return None
    return Failure(
        kind=kind,
        finite_in_fp32=not kinds_of(program.run_in(torch.float32)),
        finite_exactly=not kinds_of(program.run_last_exactly()),
        taken=next(iter(kinds_of(program.taken_by_last())), None),
        results=frozenset(place for place, tensor in enumerate(made) if kind in kinds_of((tensor,))),
    )


def shrink(program: Program, failure: Failure) -> Program:
    """Return the program with its tensors sliced as far as `failure` persists."""
    return _Shrinking(failure).shrink(program)


class _Shrinking:
    """A search for smaller programs with a limited number of runs; it keeps the best one when they are used up."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._runs_left = _MAX_RUNS

    def shrink(self, program: Program) -> Program:
        """Slice every dimension until no slice is smaller."""
        before = None
        while before != (before := sum(leaf.numel() for leaf in program.leaves.values())):
            for slots in [*_groups(program)]:
                if len({program.leaves[name].shape[dim] for name, dim in slots}) == 1:
                    program = self._narrow(program, slots)
        return program

    def _narrow(self, program: Program, slots: tuple[Dimension, ...]) -> Program:
        """Cut the dimensions `slots` together, at either end: by half while the failure persists, then by less."""
        width = _extent(program, slots) // 2
        while width > 0:
            shorter = next(filter(self._still_fails, _cut(program, slots, width)), None)
            program = program if shorter is None else shorter
            width = width // 2 if shorter is None else min(width, _extent(program, slots) // 2)
        return program

    def _still_fails(self, program: Program) -> bool:
        """Return True if the program fails as the first one did; False once the runs are used up."""
        self._runs_left -= 1
        return self._runs_left > 0 and self._failure.is_shown_by(program)


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
        if size > 1:
            counts = range(len(slots), 0, -1) if len(slots) <= _MAX_SLOTS else (len(slots), 3, 2, 1)
            for count in counts:
                yield from itertools.combinations(slots, count)


def _cut(program: Program, slots: tuple[Dimension, ...], width: int) -> Iterator[Program]:
    """Yield the program without the first or the last `width` of the dimensions, with sizes among its arguments."""
    size = _extent(program, slots)
    is_named = any(type(value) is int and value == size for value in program.arguments())
    for resized in (program, _with_sizes(program, size, size - width)) if is_named else (program,):
        for start in (width, 0):
            leaves = dict(program.leaves)
            for name, dim in slots:
                leaves[name] = leaves[name].narrow(dim, start, size - width)
            yield _with_fitting_gradient(replace(resized, leaves=leaves), start / size)


def _with_fitting_gradient(program: Program, start: float) -> Program:
    """Return the program with its gradient cut to the result's shape, from `start`, a share of its size, on.

    The gradient of a convolution with strides or without padding has another size than the input.
    """
    if program.gradient is None:
        return program
    gradient = program.leaves[program.gradient]
    try:
        shape = program.result_shape
    except Exception:  # mismatched shapes raise any exception of the op
        return program
    if len(shape) == gradient.dim():
        for dim, (size, wanted) in enumerate(zip(gradient.shape, shape, strict=True)):
            if wanted < size:
                gradient = gradient.narrow(dim, min(round(start * size), size - wanted), wanted)
    return program.with_values(**{program.gradient: gradient})


def _with_sizes(program: Program, size: int, new: int) -> Program:
    """Return the program with another size in lists of ints, such as the shape to view as or to normalise over."""

    def resize_lists(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [new if type(item) is int and item == size else item for item in value]

    nodes = tuple(
        replace(
            node,
            args=tuple(map(resize_lists, node.args)),
            kwargs={name: resize_lists(value) for name, value in node.kwargs.items()},
        )
        for node in program.nodes
    )
    return replace(program, nodes=nodes)
