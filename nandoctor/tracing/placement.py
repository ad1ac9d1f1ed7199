"""Where in a tensor its values lie: over two dimensions, over the exponents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nandoctor.evidence.trace import Grid

MAX_CELLS = 32
MAX_SAMPLES = 64


def place_nonfinite(nonfinite: torch.Tensor) -> Grid | None:
    """Where the True elements of `nonfinite` are, over the two dimensions along which their number varies most.

    Dimension 0, the batch, is left out where two others are there: which samples are non-finite is told apart.
    """
    if nonfinite.dim() == 0:
        return None
    candidates = range(1, nonfinite.dim()) if nonfinite.dim() > 2 else range(nonfinite.dim())
    dims = tuple(sorted(sorted(candidates, key=lambda dim: (_unevenness(nonfinite, dim), dim))[-2:]))
    counts = _sum_others(nonfinite, dims)
    for axis in range(len(dims)):
        counts = _join_cells(counts, axis)
    table = counts.reshape(-1, counts.shape[-1])
    return Grid(
        dims=dims,
        sizes=tuple(nonfinite.shape[dim] for dim in dims),
        numel=nonfinite.numel(),
        counts=tuple(tuple(row) for row in table.tolist()),
    )


def _unevenness(nonfinite: torch.Tensor, dim: int) -> float:
    """By how much the share of non-finite elements differs along a dimension; -1 where that has no second place."""
    if nonfinite.shape[dim] < 2:
        return -1.0
    counts = _sum_others(nonfinite, (dim,))
    return float(counts.max() - counts.min()) * nonfinite.shape[dim] / nonfinite.numel()


def _sum_others(nonfinite: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    others = [dim for dim in range(nonfinite.dim()) if dim not in dims]
    return nonfinite.sum(dim=others) if others else nonfinite.long()


def _join_cells(counts: torch.Tensor, axis: int) -> torch.Tensor:
    """Neighbours along `axis` added up until at most MAX_CELLS are left."""
    size = counts.shape[axis]
    num_cells = min(size, MAX_CELLS)
    cells = torch.arange(size, device=counts.device) * num_cells // size
    shape = [num_cells if dim == axis else length for dim, length in enumerate(counts.shape)]
    return torch.zeros(shape, dtype=counts.dtype, device=counts.device).index_add_(axis, cells, counts)


def count_exponents(magnitudes: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """How many finite non-zero elements have each binary exponent, floor(log2(magnitude)), in rising order."""
    kept = magnitudes[(magnitudes > 0) & torch.isfinite(magnitudes)]
    if not kept.numel():
        return ()
    wide = kept if kept.dtype == torch.float64 else kept.float()
    exponents = torch.frexp(wide).exponent.long() - 1
    lowest = int(exponents.min())
    counts = torch.bincount(exponents - lowest).tolist()
    return tuple((lowest + place, count) for place, count in enumerate(counts) if count)
