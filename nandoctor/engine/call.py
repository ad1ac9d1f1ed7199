"""How a step calls its model: with which batch, and what in that is one sample."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nandoctor.dumps.stored_tensor import is_dense

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call of a model on a batch.

    `batch` holds every array that may be needed, on the step's device. `forward` takes it and returns the model's
    output, reading the arrays in `used`. `description` shows the call.
    """

    batch: Batch
    used: frozenset[str]
    forward: Callable[[Batch], Any]
    description: str = ""

    @property
    def taken(self) -> dict[str, torch.Tensor]:
        """The arrays that the model takes."""
        return {name: tensor for name, tensor in self.batch.items() if name in self.used}

    @property
    def batch_size(self) -> int | None:
        """The number of samples: the most frequent length of the arrays that the model takes, or of all, if any."""
        lengths = Counter(tensor.shape[0] for tensor in _of_all_samples(self.taken or self.batch) if tensor.dim())
        return lengths.most_common(1)[0][0] if lengths else None

    @property
    def sample_count(self) -> int | None:
        """`batch_size`, or None if as many arrays have another length, or arrays list the edges of a graph.

        Edges are two rows of integers, from and to, or a sparse tensor.
        """
        size = self.batch_size
        taken = _of_all_samples({name: tensor for name, tensor in self.taken.items() if tensor.dim()})
        others = Counter(tensor.shape[0] for tensor in taken if tensor.shape[0] != size)
        as_many = max(others.values(), default=0) >= sum(tensor.shape[0] == size for tensor in taken) > 0
        tables = (tensor for tensor in taken if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32))
        has_edges = any(table.shape[0] == 2 != size for table in tables)
        return None if as_many or has_edges or not all(map(is_dense, taken)) else size

    @property
    def time_first(self) -> Literal["never", "unlikely", "possible"]:
        """How likely dimension 0, which `sample_count` counts, is time: it may be if sequences have that length.

        It is unlikely beside an array of as many rows that is no sequence, such as a target, and for token ids.
        """
        size = self.sample_count
        arrays = [tensor for tensor in self.batch.values() if tensor.dim() and tensor.shape[0] == size]
        sequences = {tensor.shape[:2] for tensor in arrays if tensor.dim() in (3, 5)}
        if not sequences:
            has_ids = any(tensor.dim() == 2 and not tensor.is_floating_point() for tensor in arrays)
            return "unlikely" if has_ids else "never"
        others = [tensor.shape for tensor in arrays if tensor.dim() in (1, 2, 4)]
        is_alone = all(shape[:2] in sequences or shape == (size, size) for shape in others)
        return "possible" if is_alone else "unlikely"

    def on_samples(self, kept: Sequence[int]) -> Call:
        """Return the call with these samples alone, of every array as long as those that the model takes."""
        size, index = self.batch_size, torch.tensor(kept, dtype=torch.long)
        batch = {
            name: tensor[index.to(tensor.device)] if is_dense(tensor) and tensor.shape[:1] == (size,) else tensor
            for name, tensor in self.batch.items()
        }
        return replace(self, batch=batch)


_LISTED = re.compile(r"\.\d+\.")


def _of_all_samples(batch: Batch) -> list[torch.Tensor]:
    """Return the arrays except those in a list of dicts (`labels.1.boxes`), which are one sample's, if any remain."""
    others = [tensor for name, tensor in batch.items() if not _LISTED.search(name)]
    return others or list(batch.values())
