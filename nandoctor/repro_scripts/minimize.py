"""Makes the tensors of an excerpt as small and plain as they can be while it still fails in the same way.

In: an `Excerpt` that fails. Out: a smaller one that fails alike: the same kind of value, and fp32 finite if it was.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nandoctor.repro_scripts.program import Excerpt, Kind, kinds_of

_MAX_RUNS = 1500
_MAX_SLOTS = 6
_MAX_SHARE = 64
_MAX_DIGITS = 9

Slot = tuple[str, int]
"""A leaf and one of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an excerpt fails: the worst kind of value that it gives, and whether fp32 gives none."""

    kind: Kind
    finite_in_fp32: bool

    def is_shown_by(self, excerpt: Excerpt) -> bool:
        """Whether the excerpt fails so; one that does not run does not."""
        try:
            found = kinds_of(excerpt.run())
            return self.kind in found and (not kinds_of(excerpt.run_in_fp32())) == self.finite_in_fp32
        except Exception:  # shapes that do not fit each other raise whatever the op raises
            return False


def find_failure(excerpt: Excerpt) -> Failure | None:
    """How the excerpt fails, None where it is finite."""
    kinds = kinds_of(excerpt.run())
    return Failure(kind=kinds[0], finite_in_fp32=not kinds_of(excerpt.run_in_fp32())) if kinds else None


def shrink(excerpt: Excerpt, failure: Failure) -> Excerpt:
    """The excerpt with its tensors sliced, made constant and rounded, as far as `failure` stays."""
    return _Shrinking(failure).shrink(excerpt)


class _Shrinking:
    """The search; it counts its runs, and keeps what it has when they are used up."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._runs_left = _MAX_RUNS

    def shrink(self, excerpt: Excerpt) -> Excerpt:
        """Halves first, since each run of what is large takes long; one value for all before single elements go."""
        excerpt = self._narrow_all(excerpt, 2)
        excerpt = self._simplify(excerpt, _constants)
        excerpt = self._narrow_all(excerpt, _MAX_SHARE)
        return self._simplify(self._simplify(excerpt, _constants), _roundings)

    def _narrow_all(self, excerpt: Excerpt, finest: int) -> Excerpt:
        before = None
        while before != (before := _size(excerpt)):
            for slots in [*_groups(excerpt)]:
                if _are_alike(excerpt, slots):
                    excerpt = self._narrow(excerpt, slots, finest)
        return excerpt

    def _holds(self, excerpt: Excerpt) -> bool:
        self._runs_left -= 1
        return self._runs_left > 0 and self._failure.is_shown_by(excerpt)

    def _narrow(self, excerpt: Excerpt, slots: tuple[Slot, ...], finest: int) -> Excerpt:
        """Slice the dimensions `slots` together: halves first, then whatever can be left out, to shares of `finest`."""
        for change in (_sliced, *([_sliced_with_sizes] if _names_size(excerpt, _extent(excerpt, slots)) else [])):
            size = _extent(excerpt, slots)
            share = 2
            while size > 1 and share <= min(2 * size, finest):
                width = max(1, math.ceil(size / share))
                smaller = self._first(change(excerpt, slots, kept) for kept in _candidates(size, width, share))
                if smaller is None:
                    share *= 2
                    continue
                excerpt, size = smaller, _extent(smaller, slots)
                share = 2
        return excerpt

    def _simplify(self, excerpt: Excerpt, values_for: Callable[[torch.Tensor], Iterator[torch.Tensor]]) -> Excerpt:
        """The plainest of these values for each leaf."""
        for name, leaf in excerpt.leaves.items():
            simpler = self._first(excerpt.with_leaves(**{name: values}) for values in values_for(leaf))
            excerpt = excerpt if simpler is None else simpler
        return excerpt

    def _first(self, candidates: Iterable[Excerpt]) -> Excerpt | None:
        return next((candidate for candidate in candidates if self._holds(candidate)), None)


def _size(excerpt: Excerpt) -> int:
    return sum(leaf.numel() for leaf in excerpt.leaves.values())


def _extent(excerpt: Excerpt, slots: tuple[Slot, ...]) -> int:
    name, dim = slots[0]
    return excerpt.leaves[name].shape[dim]


def _groups(excerpt: Excerpt) -> Iterator[tuple[Slot, ...]]:
    """Dimensions of equal size, that may have to shrink together: all of them, then ever fewer."""
    by_size: dict[int, list[Slot]] = defaultdict(list)
    for name, leaf in excerpt.leaves.items():
        for dim, size in enumerate(leaf.shape):
            by_size[size].append((name, dim))
    for size, slots in sorted(by_size.items(), reverse=True):
        if size > 1:
            counts = range(len(slots), 0, -1) if len(slots) <= _MAX_SLOTS else (len(slots), 3, 2, 1)
            for count in counts:
                yield from itertools.combinations(slots, count)


def _are_alike(excerpt: Excerpt, slots: tuple[Slot, ...]) -> bool:
    """Whether these dimensions have one size still, after others were narrowed."""
    return len({excerpt.leaves[name].shape[dim] for name, dim in slots}) == 1


def _candidates(size: int, width: int, share: int) -> Iterator[torch.Tensor]:
    """Indices to keep: each part of `width` by itself, then everything but that part."""
    everything = torch.arange(size)
    starts = range(0, size, width)
    if share == 2:
        yield from (everything[start : start + width] for start in starts if width < size)
    for start in starts:
        kept = torch.cat([everything[:start], everything[start + width :]])
        if len(kept):
            yield kept


def _sliced(excerpt: Excerpt, slots: tuple[Slot, ...], kept: torch.Tensor) -> Excerpt:
    leaves = dict(excerpt.leaves)
    for name, dim in slots:
        leaves[name] = leaves[name].index_select(dim, kept)
    return replace(excerpt, leaves=leaves)


def _names_size(excerpt: Excerpt, size: int) -> bool:
    """Whether the size stands among the whole numbers of an op's arguments."""
    values = (value for node in excerpt.nodes for value in pytree.tree_leaves((node.args, dict(node.kwargs))))
    return any(type(value) is int and value == size for value in values)


def _sliced_with_sizes(excerpt: Excerpt, slots: tuple[Slot, ...], kept: torch.Tensor) -> Excerpt:
    """The same, and the size wherever it stands in a list of whole numbers: a shape to view, to normalise over."""
    size = _extent(excerpt, slots)

    def resize(value: Any) -> Any:
        return len(kept) if type(value) is int and value == size else value

    def resize_lists(value: Any) -> Any:
        return [resize(item) for item in value] if isinstance(value, (list, tuple)) else value

    nodes = tuple(
        replace(node, args=tuple(map(resize_lists, node.args)), kwargs=_map_values(resize_lists, node.kwargs))
        for node in excerpt.nodes
    )
    return _sliced(replace(excerpt, nodes=nodes), slots, kept)


def _map_values(change: Callable[[Any], Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}


def _constants(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """One value for all of a leaf that is finite: none, one, its mean or its largest, to few digits."""
    if leaf.numel() == 0 or not torch.isfinite(leaf).all():
        return
    yield from (torch.zeros_like(leaf), torch.ones_like(leaf))
    if leaf.is_floating_point():
        ends = float(leaf.double().mean()), float(leaf.flatten()[leaf.abs().argmax()])
        yield from (torch.full_like(leaf, _round(value, digits)) for digits in (1, 2, 3) for value in ends)


def _roundings(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """A leaf's values rounded to ever more digits."""
    for digits in range(1, _MAX_DIGITS + 1) if leaf.is_floating_point() else ():
        yield leaf.clone().double().apply_(partial(_round, digits=digits)).to(leaf.dtype)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
