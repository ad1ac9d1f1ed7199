"""Compares the gradients of two runs of one step: how far they are apart, all together and each, and in direction."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch.nn.functional import hardshrink

from nandoctor.fixes.agreement import Result, norm_of

_PIECE = 1 << 16
_SIGNIFICANT = 0.01
"""A gradient's elements below this share of its largest have a sign that rounding may decide."""
LEAST, LEAST_IN_FP32 = 1e-4, 1e-6
"""The same share for a whole weight's gradient, of the largest of all weights: in a half format, and of two in fp32."""
_REVERSED = 0.1
"""The share of a gradient, by magnitude, that may have the other sign."""


def gradient_error(
    made: Result, reference: Result, names: Collection[str] | None = None, *, grain: float = 0.0
) -> float:
    """Return the norm of the difference of gradients, relative to the norm of the reference's finite ones.

    They are those of all weights in both, or of `names`. Differences up to `grain` are ignored: the run's format cannot
    represent them.
    """
    names = names or made.gradients.keys() & reference.gradients
    pieces = (ours - theirs for name in names for ours, theirs in _pieces(made, reference, name))
    difference = math.hypot(*(norm_of(hardshrink(piece, grain) if grain else piece) for piece in pieces))
    norm = math.hypot(*(reference.gradient_norms[name] for name in names))
    return difference / norm if norm else difference


def gradient_errors(made: Result, meant: Result, *, least: float = LEAST) -> dict[str, float]:
    """Return how far the gradient of each parameter is off what it should be, without those that are small beside all.

    All gradients together may hide that a small one is lost; an optimizer such as Adam makes them alike.
    """
    sizes = meant.gradient_sizes
    largest = max(sizes.values(), default=0.0)
    counted = [name for name in sorted(sizes) if sizes[name] > least * largest]
    return {name: gradient_error(made, meant, (name,)) if name in made.gradients else 1.0 for name in counted}


def reversed_gradient(made: Result, meant: Result, *, least: float = LEAST) -> str | None:
    """Return the parameter whose gradient mostly points the other way than it should, or None."""
    worst, most = None, _REVERSED
    for name in sorted(made.gradients.keys() & meant.gradients):
        # That of a bias before a softmax is 0 but for rounding.
        is_noise = any(run.gradient_sizes[name] <= least * max(run.gradient_sizes.values()) for run in (made, meant))
        same_shape = made.gradients[name].shape == meant.gradients[name].shape
        share = _share_reversed(made, meant, name) if same_shape and not is_noise else 0.0
        worst, most = (name, share) if share > most else (worst, most)
    return worst


def _share_reversed(made: Result, meant: Result, name: str) -> float:
    """Return the share of a gradient, by magnitude, in which another has a significant element of the other sign.

    An element of the other sign is off by more than its magnitude; if all are off by less together, none is looked at.
    """
    our_least, least = (_SIGNIFICANT * run.gradient_sizes[name] for run in (made, meant))
    pieces = [*_pieces(made, meant, name)]
    off = math.fsum(_total(ours - theirs) for ours, theirs in pieces)
    whole = math.fsum(_total(hardshrink(theirs, least)) for _, theirs in pieces)
    if off <= _REVERSED * whole:
        return 0.0
    turned = 0.0
    for ours, theirs in pieces:
        counted = (theirs.abs() >= least) & (ours.abs() >= our_least) & ((ours < 0) != (theirs < 0))
        turned += _total(theirs * counted)
    return turned / whole if turned else 0.0


def _pieces(made: Result, reference: Result, name: str) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a gradient of both runs in pieces whose temporaries stay in the cache, which is ten times as fast."""
    pair = made.gradients[name], reference.gradients[name]
    if all(tensor.layout is torch.strided for tensor in pair):
        return zip(*(torch.split(tensor.flatten(), _PIECE) for tensor in pair), strict=True)
    return iter((pair,))


def _total(values: torch.Tensor) -> float:
    """Return the sum of the magnitudes, which is twice as fast as torch's norm of order 1."""
    return float(values.abs().sum(dtype=torch.promote_types(values.dtype, torch.float32)))
