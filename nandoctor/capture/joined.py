"""Copy and measure many tensors in a few calls of torch: a call for each would be most of the recorder's cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import nn

from nandoctor.capture.sharding import local_part
from nandoctor.torch_compat import flatten, infinity_norms, passing_autograd, sparse_values

_SMALL = 1 << 16
"""Number of elements above which a tensor is measured in place, since joining it would copy it."""
_DENSE = (torch.Tensor, nn.Parameter)


class JoinOrder:
    """An order of tensors that puts those that one `torch.cat` can join next to each other.

    These share a device, a dtype and all of their shape but the first dimension; a large or odd one is joined with no
    other. `places` are their indices in the original sequence. The tensors are not stored: every method takes them
    again, in this order. The methods bypass autograd, which is a third of a join's cost.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds: dict[object, list[int]] = {}
        for place, tensor in enumerate(tensors):
            alone = place if tensor.numel() > _SMALL or not can_join(tensor) else None
            kind = (tensor.device, tensor.dtype, tensor.dim() > 0, tensor.shape[1:], alone)
            kinds.setdefault(kind, []).append(place)
        self.places = tuple(chain(*kinds.values()))
        self._shapes = [[tensors[place].shape for place in kind] for kind in kinds.values()]
        ends = [0, *accumulate(map(len, self._shapes))]
        self._slices = [slice(start, end) for start, end in pairwise(ends)]
        # Flattening a few small tensors is faster than another call of torch.
        self._is_few = len(tensors) <= 8 * len(kinds) and all(tensor.numel() <= _SMALL for tensor in tensors)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Join the tensors in new memory."""
        with torch.no_grad():
            groups = [tensors[part] for part in self._slices]
            return [_join(group) if len(group) > 1 else group[0].detach().clone() for group in groups]

    def split(self, joined: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each tensor as a view of the result of `copy`."""
        for tensor, shapes in zip(joined, self._shapes, strict=True):
            if len(shapes) == 1:
                yield tensor
            else:
                yield from torch.split(tensor, [shape[0] for shape in shapes]) if shapes[0] else tensor.unbind()

    def largest(self, tensors: Sequence[torch.Tensor | None]) -> float | None:
        """Return the largest magnitude of all elements, NaN if one is NaN; None if all tensors are None."""
        bounds: list[float] = []
        with passing_autograd():
            for part in [slice(None)] if self._is_few else self._slices:
                if present := [tensor for tensor in tensors[part] if tensor is not None]:
                    join = flatten if self._is_few else _join
                    low, high = torch.aminmax(present[0] if len(present) == 1 else join(present))
                    bounds += (-low.item(), high.item())
        return math.nan if any(map(math.isnan, bounds)) else max(bounds, default=None)


def can_join(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is strided, not empty, and a plain Tensor or Parameter, not of a subclass."""
    return type(tensor) in _DENSE and tensor.layout is torch.strided and tensor.numel() > 0


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the tensors. Writing into `out` bypasses autocast, which under bf16 refuses to join fp16 tensors."""
    join = torch.cat if tensors[0].dim() else torch.stack
    try:
        return join(tensors)  # type: ignore[arg-type]
    except RuntimeError:
        return join(tensors, out=tensors[0].new_empty(0))  # type: ignore[arg-type]


def plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient or weight: the values of a sparse one, this rank's part of a sharded one."""
    if can_join(tensor):
        return tensor
    local = local_part(tensor)
    return sparse_values(local) if local.is_sparse else local


def largest_magnitude(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest magnitude of all elements as a scalar on the device, NaN if one is NaN; None without any."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for plain in map(plain_part, tensors):
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        if real.numel():
            groups.setdefault((real.device, real.dtype), []).append(real)
    if not groups:
        return None
    with torch.no_grad():
        found = [torch.stack(infinity_norms(group)).amax() for group in groups.values()]
        wide = torch.float64 if any(bound.dtype == torch.float64 for bound in found) else torch.float32
        bounds = [bound.to(found[0].device, wide) for bound in found]
        return bounds[0] if len(bounds) == 1 else torch.stack(bounds).amax()
