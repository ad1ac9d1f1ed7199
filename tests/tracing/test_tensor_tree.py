"""Tensors are found in whatever a model returns, and what cannot be looked into is named."""

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from nandoctor.tracing.tensor_stats import list_unread, walk_tensors

ONE = torch.ones(2, 3)


class Slotted:
    __slots__ = ("__kept", "empty")

    def __init__(self, kept):
        self.__kept = kept

    @property
    def logits(self):
        return self.__kept


class Attributed:
    """A tensor as an attribute, beside the object itself and the model that made it."""

    def __init__(self, kept):
        self.kept = {"here": [kept]}
        self.me = self
        self.model = nn.Linear(3, 3)
        self.activation = torch.relu


class Hidden:
    def __init__(self, kept):
        self.read = lambda: kept


@dataclass
class Record:
    kept: torch.Tensor
    late: torch.Tensor = field(init=False)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (ONE, ""),
        ({"a": [(ONE,)]}, "a[0][0]"),
        (Record(ONE), "kept"),
        (Slotted(ONE), "_Slotted__kept"),
        (Attributed(ONE), "kept.here[0]"),
        (Hidden(ONE), "read.kept"),
        (functools.partial(torch.add, ONE), "args[0]"),
        (ONE.sum, "__self__"),
        (np.ones((2, 3), dtype=">f4"), ""),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_tensor_is_found_by_its_place(value, place):
    assert [(where, tuple(tensor.shape)) for where, tensor in walk_tensors(value)] == [(place, (2, 3))]
    assert list_unread(value) == ()


def test_the_parameters_of_a_distribution_are_found():
    mixed = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=torch.zeros(3)),
        torch.distributions.Normal(torch.zeros(3), torch.ones(3)),
    )
    places = {place for place, _ in walk_tensors(mixed)}
    assert {"_mixture_distribution.logits", "_component_distribution.loc"} <= places
    assert list_unread(mixed) == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((row for row in ONE), ("a generator",)),
        ({"rows": iter([ONE])}, ("rows (a list_iterator)",)),
        ([map(torch.relu, ONE)], ("[0] (a map)",)),
        ({"loss": float("nan")}, ("loss (the plain number nan)",)),
        (torch.ones(2, device="meta"), ("a Tensor",)),
    ],
    ids=["generator", "iterator", "map", "number", "meta"],
)
def test_what_cannot_be_looked_into_is_named(value, said):
    assert list_unread(value) == said


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_tensor_that_refuses_to_be_read_is_named():
    assert list_unread([torch.masked.masked_tensor(ONE, ONE > 0)]) == ("[0] (a MaskedTensor)",)


@pytest.mark.parametrize("value", [None, 3, 0.5, "text", torch.float32, nn.Linear(2, 2), torch.ones(2).long(), (), {}])
def test_what_holds_no_numbers_hides_none(value):
    assert list_unread(value) == ()
    assert [tensor for _, tensor in walk_tensors(value) if tensor.is_floating_point()] == []


def test_attributes_of_an_argument_are_left_alone():
    assert list(walk_tensors([Attributed(ONE)], attributes=False)) == []
