"""One walk through whatever holds something, and containers that are made again of other parts."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch

from nandoctor.trees import BEYOND, attributes, made_of, once, parts, spell, tree_map, walk

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: int
    y: int = 2


class Slotted:
    """A slot of its own, a private one, and one that was never assigned."""

    __slots__ = ("__y", "unset", "x")

    def __init__(self, x=1, y=2):
        self.x, self.__y = x, y


class Lying(Slotted):
    """Shows other attributes than it has."""

    z = property(lambda self: 7)

    def __init__(self):
        super().__init__()
        vars(self)["z"] = 3

    @property
    def __class__(self):
        raise RuntimeError


CONTAINERS = [
    ([1, 2], {0: 1, 1: 2}),
    ((1, 2), {0: 1, 1: 2}),
    ({"x": 1, 3: 2}, {"x": 1, 3: 2}),
    (OrderedDict(x=1), {"x": 1}),
    (UserDict(x=1), {"x": 1}),
    (Pair(1, 2), {"x": 1, "y": 2}),
    (torch.return_types.max((1, 2)), {0: 1, 1: 2}),
    (deque([1]), {0: 1}),
    ({1}, {0: 1}),
    (Record(1), {"x": 1, "y": 2}),
    ([], {}),
]


@pytest.mark.parametrize(("value", "inside"), CONTAINERS, ids=lambda value: type(value).__name__)
def test_a_container_is_its_parts_and_is_made_of_others(value, inside):
    assert parts(value) == inside
    made = tree_map(lambda part: part + 1 if isinstance(part, int) else part, value)
    assert type(made) is type(value)
    assert parts(made) == {key: part + 1 for key, part in inside.items()}
    assert parts(value) == inside


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", range(3), torch.ones(2), Slotted(), Record, int])
def test_what_is_no_container_has_no_parts(value):
    assert parts(value) is None


def test_a_mapping_keeps_what_its_class_adds():
    made = tree_map(lambda part: part, defaultdict(list, x=1))
    assert (made, made["y"]) == ({"x": 1, "y": []}, [])


def test_attributes_are_those_that_are_stored():
    assert attributes(Lying()) == {"x": 1, "_Slotted__y": 2, "z": 3}
    made = made_of(Lying, {"x": 4, "_Slotted__y": 5, "z": 6})
    assert (type(made), attributes(made)) == (Lying, {"x": 4, "_Slotted__y": 5, "z": 6})


def test_a_walk_is_in_order_and_names_each_place():
    found = [(spell(place), item) for place, item in walk({"a": [1, (2,)], "b": Record(3)}) if isinstance(item, int)]
    assert found == [("a[0]", 1), ("a[1][0]", 2), ("b.x", 3), ("b.y", 2)]


def test_what_holds_itself_is_no_walk_without_end():
    loop = {"n": 1}
    loop["me"] = loop
    assert [item for _, item in walk(loop)][-1] is BEYOND
    assert [spell(place) for place, _ in walk(loop, once(parts))] == ["", "n", "me"]
    with pytest.raises(RecursionError):
        tree_map(lambda part: part, loop)


def test_what_is_shared_is_made_once():
    shared = [1]
    for _ in range(40):  # a tree with 2 ** 40 leaves
        shared = [shared, shared]
    made = tree_map(lambda part: part, shared)
    assert made[0] is made[1]
    assert made[0] is not shared[0]
