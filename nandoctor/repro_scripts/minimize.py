"""Make the tensors of a program as small and simple as possible while it still fails in the same way.

The same way means: the same kind of value from operands of the same kind, and fp32 and float64 finite if they were.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nandoctor.minimal_sets import minimise
from nandoctor.repro_scripts.program import Program, ValueKind, kinds_of

_MAX_RUNS = 1500
_MAX_SLOTS = 6
_MAX_SHARE = 64
_MAX_DIGITS = 9

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
    """Return the program with its tensors sliced, made constant and rounded as far as `failure` persists."""
    return _Shrinking(failure).shrink(program)


class _Shrinking:
    """A search for smaller programs with a limited number of runs; it keeps the best one when they are used up."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._runs_left = _MAX_RUNS

    def shrink(self, program: Program) -> Program:
        """Try halves first, since large programs run slowly, and constants before removing single elements."""
        program = self._narrow_all(program, 2)
        program = self._simplify_all(self._simplify(program, _constants))
        program = self._narrow_all(program, _MAX_SHARE)
        return self._simplify(self._simplify(self._simplify(program, _constants), _largest_alone), _roundings)

    def _narrow_all(self, program: Program, finest: int) -> Program:
        before = None
        while before != (before := sum(leaf.numel() for leaf in program.leaves.values())):
            for slots in [*_groups(program)]:
                if len({program.leaves[name].shape[dim] for name, dim in slots}) == 1:
                    program = self._narrow(program, slots, finest)
        return program

    def _still_fails(self, program: Program) -> bool:
        """Return True if the program fails as the first one did; False once the runs are used up."""
        self._runs_left -= 1
        return self._runs_left > 0 and self._failure.is_shown_by(program)

    def _narrow(self, program: Program, slots: tuple[Dimension, ...], finest: int) -> Program:
        """Slice the dimensions `slots` together to the fewest parts, of ever smaller size down to 1 / `finest`."""
        size = _extent(program, slots)
        is_named = any(type(value) is int and value == size for value in program.arguments())
        for change in (_sliced, _sliced_with_sizes) if is_named else (_sliced,):
            share = 2
            while (size := _extent(program, slots)) > 1 and share <= min(2 * size, finest):
                program = self._keep_fewest(program, partial(change, program, slots), size, share)
                share = 2 if _extent(program, slots) < size else 2 * share
        return program

    def _keep_fewest(
        self, program: Program, change: Callable[[torch.Tensor], Program], size: int, share: int
    ) -> Program:
        """Keep the fewest parts of a dimension, each 1 / `share` of it, with which the failure persists."""
        width = math.ceil(size / share)
        parts = [range(start, min(start + width, size)) for start in range(0, size, width)]

        def kept(chosen: Iterable[range]) -> torch.Tensor:
            return torch.tensor(sorted(itertools.chain.from_iterable(chosen)))

        fewest = minimise(parts, lambda chosen: self._still_fails(change(kept(chosen))))
        return change(kept(fewest)) if len(fewest) < len(parts) else program

    def _simplify(self, program: Program, values_for: Callable[[torch.Tensor], Iterator[torch.Tensor]]) -> Program:
        """Give each leaf the first of these values, simplest first, with which the program still fails."""
        for name, leaf in program.leaves.items():
            found = values_for(torch.view_as_real(leaf) if leaf.is_complex() else leaf)
            if leaf.is_complex():
                found = map(torch.view_as_complex, found)
            simpler = (program.with_values(**{name: values}) for values in found)
            program = next(filter(self._still_fails, simpler), program)
        return program

    def _simplify_all(self, program: Program) -> Program:
        """Give all leaves that still vary one magnitude each, the first one or none negated: signs may matter."""
        largest = {name: float(leaf.abs().max()) for name, leaf in program.leaves.items() if _varies(leaf)}
        varied = {name: torch.full_like(program.leaves[name], _round(value, 2)) for name, value in largest.items()}
        first = next(iter(varied), "")
        for name in (first, ""):
            constant = {other: -values if other == name else values for other, values in varied.items()}
            if self._still_fails(simpler := program.with_values(**constant)):
                return simpler
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
        if size > 1:
            counts = range(len(slots), 0, -1) if len(slots) <= _MAX_SLOTS else (len(slots), 3, 2, 1)
            for count in counts:
                yield from itertools.combinations(slots, count)


def _sliced(program: Program, slots: tuple[Dimension, ...], kept: torch.Tensor) -> Program:
    leaves = dict(program.leaves)
    for name, dim in slots:
        leaves[name] = leaves[name].index_select(dim, kept)
    return _with_fitting_gradient(replace(program, leaves=leaves), float(kept[0]) / _extent(program, slots))


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


def _sliced_with_sizes(program: Program, slots: tuple[Dimension, ...], kept: torch.Tensor) -> Program:
    """Slice, and replace the size in lists of ints, such as the shape to view as or to normalise over."""
    size = _extent(program, slots)

    def resize_lists(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [len(kept) if type(item) is int and item == size else item for item in value]

    nodes = tuple(
        replace(
            node,
            args=tuple(map(resize_lists, node.args)),
            kwargs={name: resize_lists(value) for name, value in node.kwargs.items()},
        )
        for node in program.nodes
    )
    return _sliced(replace(program, nodes=nodes), slots, kept)


def _constants(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf with one value for all finite elements: 0, 1, their mean or the largest, to few digits."""
    finite = leaf[torch.isfinite(leaf)]
    if not finite.numel():
        return
    values = [0.0, 1.0]
    if leaf.is_floating_point():
        ends = float(finite.double().mean()), float(finite[finite.abs().argmax()])
        values += [_round(value, digits) for digits in (1, 2, 3) for value in ends]
    yield from (torch.where(torch.isfinite(leaf), torch.full_like(leaf, value), leaf) for value in values)


def _varies(leaf: torch.Tensor) -> bool:
    """Return True if a floating-point leaf is finite and not constant."""
    values = leaf.flatten()
    return leaf.is_floating_point() and bool(torch.isfinite(leaf).all()) and bool((values[1:] != values[:-1]).any())


def _largest_alone(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ever more of a leaf's largest values, among zeros or ones."""
    count = 1
    while _varies(leaf) and 4 * count < leaf.numel():
        largest = leaf.abs() >= leaf.abs().flatten().kthvalue(leaf.numel() - count + 1).values
        yield from (torch.where(largest, leaf, other) for other in (0.0, 1.0))
        count *= 2


def _roundings(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a leaf's values rounded to ever more digits."""
    for digits in range(1, _MAX_DIGITS + 1) if leaf.is_floating_point() else ():
        yield leaf.clone().double().apply_(partial(_round, digits=digits)).to(leaf.dtype)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
