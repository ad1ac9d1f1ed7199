"""Where in a tensor its values lie."""

from __future__ import annotations

import math

import pytest
import torch

from nandoctor.evidence.formats import FP16, FP32
from nandoctor.evidence.trace import SampleStats
from nandoctor.tracing.exact_counts import count_exactly, place_nonfinite
from nandoctor.tracing.tensor_stats import add_counts, collect, measure


def mask(shape, *places):
    nonfinite = torch.zeros(shape, dtype=torch.bool)
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
    torch.manual_seed(0)
    nonfinite = torch.rand(2, size, 50) < 0.3
    grid = place_nonfinite(nonfinite)
    assert max(len(grid.counts), len(grid.counts[0])) <= 32
    assert sum(map(sum, grid.counts)) == int(nonfinite.sum())
    cells = torch.arange(size) * min(size, 32) // size
    assert [sum(row) for row in grid.counts] == [
        int(nonfinite[:, cells == cell].sum()) for cell in range(min(size, 32))
    ]


def samples_of(values):
    """What is counted of each sample."""
    return count_exactly(values, FP32, FP16, per_sample=True)[0].by_sample


def test_samples_are_counted_one_by_one():
    assert samples_of(torch.tensor([[1.0, -3.0], [math.nan, 2.0], [math.inf, math.nan], [0.0, 0.0]])) == (
        SampleStats(num_bad=0, absmax=3.0),
        SampleStats(num_bad=1, absmax=2.0),
        SampleStats(num_bad=2, absmax=None),
        SampleStats(num_bad=0, absmax=0.0),
    )
    assert samples_of(torch.ones(5)) == ()
    assert samples_of(torch.full((70, 3, 2), math.nan)) == (SampleStats(num_bad=6, absmax=None),) * 64
    assert len(samples_of(torch.ones(99, 2))) == 64


def stats_of(tensor, **options):
    return collect([("", add_counts(measure(tensor), tensor, FP16, **options))])[0]


def test_a_counts_places_nothing_unless_asked():
    sound, nonfinite = torch.ones(2, 3), torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    assert stats_of(sound).counts.by_sample == ()
    assert stats_of(nonfinite).counts.grid is None
    assert [sample.num_bad for sample in stats_of(nonfinite).counts.by_sample] == [1, 0]
    assert stats_of(nonfinite, place=True).counts.grid.counts == ((0, 1), (0, 0))
    assert len(stats_of(sound, per_sample=True).counts.by_sample) == 2
