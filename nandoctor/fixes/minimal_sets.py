"""The smallest sets of modules that have to stay in fp32, each proved minimal.

In: what may be kept, in the order of execution, and whether a run with some of it kept passes. Out: sets of members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_SETS = 3


def find_minimal_sets(
    members: Sequence[T], passes: Callable[[tuple[T, ...]], bool], *, guess: Sequence[T] = ()
) -> Iterator[tuple[T, ...]]:
    """Minimal sets of `members` that pass, disjoint, at most `MAX_SETS`; none where all members together do not.

    Each has its members in the order of `members`.

    A set is found with about log2(n) probes for each of its k members: the shortest run of members that passes ends in
    one that is needed; with that one kept, the next is looked for before it. This is delta debugging's search for a
    1-minimal set (Zeller and Hildebrandt, 2002) where more in fp32 never hurts (QuickXplain: Junker, 2004). Each member
    is left out once in the end, so that the set is minimal even where that does not hold. A `guess` that passes saves
    the search.
    """
    left = list(members)
    for _ in range(MAX_SETS):
        start = [member for member in guess if member in left]
        if start and passes(tuple(start)):
            found = _without_needless(start, passes)
        elif left and passes(tuple(left)):
            found = _without_needless(_search(left, passes), passes)
        else:
            return
        yield tuple(member for member in members if member in found)
        left = [member for member in left if member not in found]


def _search(members: Sequence[T], passes: Callable[[tuple[T, ...]], bool]) -> list[T]:
    """A set that passes, given that all `members` do."""
    needed: list[T] = []
    pool = list(members)
    while pool and not (needed and passes(tuple(needed))):
        shortest, longest = 1, len(pool)  # the run that passes is at least, and at most, as long
        while shortest < longest:
            middle = (shortest + longest) // 2
            if passes((*needed, *pool[:middle])):
                longest = middle
            else:
                shortest = middle + 1
        needed.append(pool[shortest - 1])
        pool = pool[: shortest - 1]
    return needed


def _without_needless(members: Sequence[T], passes: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The members of which none can be left out any more."""
    for member in members:
        rest = tuple(other for other in members if other != member)
        if rest and passes(rest):
            return _without_needless(rest, passes)
    return tuple(members)
