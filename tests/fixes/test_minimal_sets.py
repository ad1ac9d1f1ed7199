import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nandoctor.fixes.fp32_sets import MAX_SETS, find_minimal_sets


class Oracle:
    """Passes where any of `sets` is kept whole; counts distinct questions."""

    def __init__(self, *sets):
        self.sets = [frozenset(needed) for needed in sets]
        self.asked = set()

    def __call__(self, kept):
        self.asked.add(frozenset(kept))
        return any(needed <= set(kept) for needed in self.sets)


@st.composite
def disjoint_sets(draw):
    members = list(range(draw(st.integers(1, 80))))
    shuffled = draw(st.permutations(members))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=MAX_SETS))
    sets, start = [], 0
    for size in sizes:
        if start + size <= len(shuffled):
            sets.append(frozenset(shuffled[start : start + size]))
            start += size
    return members, sets or [frozenset(shuffled[:1])]


@given(disjoint_sets())
def test_every_set_is_found_and_minimal(given_sets):
    members, sets = given_sets
    assert set(map(frozenset, find_minimal_sets(members, Oracle(*sets)))) == set(sets)


@pytest.mark.parametrize(("n", "needed"), [(60, (13, 47)), (60, (0, 59)), (400, (7,)), (400, (3, 200, 399))])
def test_probes_stay_within_the_bound(n, needed):
    oracle = Oracle(needed)
    (found,) = find_minimal_sets(range(n), oracle)
    assert set(found) == set(needed)
    assert len(oracle.asked) <= 4 * len(needed) * math.log2(n)


def test_a_guess_with_more_than_is_needed_is_cut_down():
    (found,) = find_minimal_sets(range(20), Oracle((4,)), guesses=[(3, 4, 5)])
    assert found == (4,)


def test_leaving_any_member_out_brings_the_failure_back():
    def passes(kept):  # 5 spoils what 2 and 8 mend, unless 6 is there
        return {2, 8} <= set(kept) and (5 not in kept or 6 in kept)

    for found in find_minimal_sets(range(10), passes):
        assert passes(found)
        assert not any(passes(tuple(other for other in found if other != member)) for member in found)
