"""Where in a tensor its values lie."""

import math

import pytest
import torch

from nandoctor.tracing.exact_counts import place_nonfinite
from nandoctor.tracing.tensor_stats import add_counts, collect, measure


def mask(shape, *places):
    nonfinite = torch.zeros(shape, dtype=torch.bool).numpy()
    for place in places:
        nonfinite[place] = True
    return nonfinite


def test_nothing_uneven_is_shown_over_the_last_two_dimensions():
    grid = place_nonfinite(mask((4, 8, 3, 5), 2))
    assert (grid.dims, grid.sizes, grid.numel) == ((2, 3), (3, 5), 480)
    assert grid.counts == ((8,) * 5,) * 3


def test_a_nonfinite_channel_is_shown_and_not_the_rows_it_fills():
    grid = place_nonfinite(mask((2, 6, 3, 5), (slice(None), 4)))
    assert grid.dims == (1, 3)
    assert [sum(row) for row in grid.counts] == [0, 0, 0, 0, 30, 0]


@pytest.mark.parametrize(
    ("shape", "dims", "counts"),
    [((3,), (0,), ((0, 1, 0),)), ((2, 3), (0, 1), ((0, 0, 0), (1, 1, 1))), ((2, 3, 1), (1, 2), ((0,), (1,), (0,)))],
)
def test_few_dimensions(shape, dims, counts):
    nonfinite = mask(shape, 1) if len(shape) < 3 else mask(shape, (1, 1))
    grid = place_nonfinite(nonfinite)
    assert (grid.dims, grid.counts) == (dims, counts)


@pytest.mark.parametrize("size", [31, 32, 33, 100, 1000])
def test_large_dimensions_are_joined_into_cells_without_loss(size):
    nonfinite = torch.rand(2, size, 50).numpy() < 0.3
    grid = place_nonfinite(nonfinite)
    assert max(len(grid.counts), len(grid.counts[0])) <= 32
    assert sum(map(sum, grid.counts)) == int(nonfinite.sum())
    cells = (torch.arange(size) * min(size, 32) // size).numpy()
    assert [sum(row) for row in grid.counts] == [
        int(nonfinite[:, cells == cell].sum()) for cell in range(min(size, 32))
    ]


def stats_of(tensor, **options):
    return collect([("", add_counts(measure(tensor), tensor, **options))])[0]


def test_a_counts_places_nothing_unless_asked():
    sound, nonfinite = torch.ones(2, 3), torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    assert stats_of(nonfinite).counts.grid is None
    assert stats_of(nonfinite, place=True).counts.grid.counts == ((0, 1), (0, 0))
    assert stats_of(sound, place=True).counts.grid is None
