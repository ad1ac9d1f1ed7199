"""What is in a dump file and what its optimizer held, and where it was replayed, as numbers and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.trace import TensorStats

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSlot:
    """One parameter's running mean of squared gradients, counted exactly; its format is that of the weight's step.

    `parameter` is the dotted name, "" where the optimizer's order did not fit the model's. `eps` is added to the root.
    `safe_eps` is the smallest eps tried with which the optimizer's step, taken in the format of the moments, is finite
    and within the bound that exact moments give it; None where none is.
    """

    parameter: str
    eps: float
    moment: TensorStats
    safe_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """An update that left weights non-finite, while all gradients were finite.

    `optimizer` is its class, "" where the training loop itself wrote. `parameters` maps the dotted names of those
    weights to how many of their values are non-finite, and how many there are. `settings` are the numbers in the
    optimizer's groups (lr, weight_decay, ...). `largest_gradient` is a magnitude, None where the gradients were
    not looked at.
    """

    optimizer: str
    parameters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    largest_gradient: float | None = None
