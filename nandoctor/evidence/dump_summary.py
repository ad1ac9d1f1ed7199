"""What is in a dump file, and where it was replayed, as numbers and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["input", "target", "output", "unknown"]
Layout = Literal["plain", "weights-only", "batch-only", "nandoctor.dump/1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySummary:
    """One array of the file; `num_*` are zero for integer and boolean arrays. `role` is a guess from its name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role | None
    num_nan: int
    num_posinf: int
    num_neginf: int

    @property
    def num_bad(self) -> int:
        """NaN and infinities together."""
        return self.num_nan + self.num_posinf + self.num_neginf


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSummary:
    """The file as a whole.

    `arrays` are the saved batch and outputs; `scalars` the plain values beside them (step, epoch, loss scale).
    `bad_weights` and `bad_buffers` are the non-finite tensors of the state dict: a name that ends in
    running_mean, running_var or num_batches_tracked, or that the file itself lists as a buffer, counts as a buffer.
    `missing` says, one sentence each, what a full replay would need and how to save it next time; `notes`, which
    weights were chosen and what the file holds besides.
    """

    path: str
    nbytes: int
    layout: Layout
    num_weights: int
    num_parameters: int
    prefix: str
    arrays: tuple[ArraySummary, ...]
    scalars: tuple[tuple[str, str], ...]
    bad_weights: tuple[ArraySummary, ...]
    bad_buffers: tuple[ArraySummary, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFlags:
    """What the file says went wrong in its step: a non-finite loss (None: there was none), non-finite gradients.

    `rank` of `num_ranks` wrote the file. `here` is False where the non-finite loss was another rank's.
    """

    loss: float | None = None
    gradients: bool = False
    here: bool = True
    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the replay ran."""

    nandoctor: str
    torch: str
    python: str
    platform: str
    device: str
