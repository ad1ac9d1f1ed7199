"""Searches for minimal sets of modules to keep in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_SETS = 3


def find_minimal_sets(
    members: Sequence[T], holds: Callable[[tuple[T, ...]], bool], *, guesses: Sequence[Sequence[T]] = ()
) -> Iterator[tuple[T, ...]]:
    """Yield minimal sets of `members` that hold, disjoint, at most `MAX_SETS`; none if all members together do not.

    The first of the `guesses` that holds saves the search; put the likeliest and smallest first.
    """
    left = tuple(members)
    for number in range(MAX_SETS):
        # Mostly there is only one set, so test whether the rest holds before the rests of the guesses.
        if number and not (left and holds(left)):
            return
        starts = (tuple(member for member in guess if member in left) for guess in guesses)
        start = next((start for start in starts if start and holds(start)), ())
        if not (start or number or (left and holds(left))):
            return
        found = minimise(start or left, holds)
        yield tuple(member for member in members if member in found)
        left = tuple(member for member in left if member not in found)


def minimise(members: Sequence[T], holds: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a set that holds, without any needless member, in the order of `members`; these must hold together.

    If more members never hurt, k of n are found with about 2 k log2(n / k) tests (QuickXplain: Junker, 2004). In the
    end each is left out once, so that the set is 1-minimal (Zeller and Hildebrandt, 2002) even if they do.
    """
    found = set(_needed(tuple(members), holds))
    kept = [member for member in members if member in found]
    return _without_needless(kept if holds(tuple(kept)) else members, holds)


def _needed(members: tuple[T, ...], holds: Callable[[tuple[T, ...]], bool], known: tuple[T, ...] = ()) -> tuple[T, ...]:
    """Return the members that are needed besides `known`, which is not enough by itself."""
    if len(members) == 1:
        return members
    first, second = members[: len(members) // 2], members[len(members) // 2 :]
    later = () if holds((*known, *first)) else _needed(second, holds, (*known, *first))
    earlier = () if later and holds((*known, *later)) else _needed(first, holds, (*known, *later))
    return (*earlier, *later)


def _without_needless(members: Sequence[T], holds: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Leave out members one by one until each that is left is needed, and return these."""
    kept = tuple(members)
    for member in members:
        rest = tuple(other for other in kept if other != member)
        if rest and holds(rest):
            kept = rest
    # A member that was needed besides others may not be once they are gone.
    return kept if len(kept) == len(members) else _without_needless(kept, holds)
