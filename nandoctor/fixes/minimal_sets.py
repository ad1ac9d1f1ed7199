"""The smallest sets of modules that have to stay in fp32, each proved minimal.

In: what may be kept, in the order of execution, and whether keeping some of it cures. Out: sets of members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_SETS = 3


def find_minimal_sets(
    members: Sequence[T], cures: Callable[[tuple[T, ...]], bool], *, guess: Sequence[T] = ()
) -> Iterator[tuple[T, ...]]:
    """Minimal sets of `members` that cure, disjoint, at most `MAX_SETS`; none where all members together do not.

    Each has its members in the order of `members`.

    A set is found with about log2(n) probes for each of its k members: the shortest run of members that cures ends in
    one that is needed; with that one kept, the next is looked for before it. This is delta debugging's search for a
    1-minimal set (Zeller and Hildebrandt, 2002) where more in fp32 never hurts (QuickXplain: Junker, 2004). Each member
    is left out once in the end, so that the set is minimal even where that does not hold. A `guess` that cures saves
    the search.
    """
    left = list(members)
    for _ in range(MAX_SETS):
        start = [member for member in guess if member in left]
        if start and cures(tuple(start)):
            found = _without_needless(start, cures)
        elif left and cures(tuple(left)):
            found = _without_needless(_search(left, cures), cures)
        else:
            return
        yield tuple(member for member in members if member in found)
        left = [member for member in left if member not in found]


def _search(members: Sequence[T], cures: Callable[[tuple[T, ...]], bool]) -> list[T]:
    """A set that cures, given that all `members` do."""
    needed: list[T] = []
    pool = list(members)
    while pool and not (needed and cures(tuple(needed))):
        shortest, longest = 1, len(pool)  # the run that cures is at least, and at most, as long
        while shortest < longest:
            middle = (shortest + longest) // 2
            if cures((*needed, *pool[:middle])):
                longest = middle
            else:
                shortest = middle + 1
        needed.append(pool[shortest - 1])
        pool = pool[: shortest - 1]
    return needed


def _without_needless(members: Sequence[T], cures: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The members of which none can be left out any more."""
    for member in members:
        rest = tuple(other for other in members if other != member)
        if rest and cures(rest):
            return _without_needless(rest, cures)
    return tuple(members)
