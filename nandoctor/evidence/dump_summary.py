"""Records of what a dump file and its optimizer hold, and of where it was replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.trace import TensorStats

NO_TARGET = "No target: a loss that takes one cannot be replayed. Next time add 'target': target.cpu()."
Role = Literal["input", "target", "output", "unknown"]
Layout = Literal["plain", "weights-only", "batch-only", "nandoctor.dump/1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySummary:
    """One array of the file; `num_*` are 0 for integer and boolean arrays. `role` is guessed from the name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role | None
    num_nan: int
    num_posinf: int
    num_neginf: int

    @property
    def num_bad(self) -> int:
        """The number of NaN and infinities together."""
        return self.num_nan + self.num_posinf + self.num_neginf


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSummary:
    """The file as a whole.

    `arrays` are the saved batch and outputs; `scalars` the plain values beside them (step, epoch, loss scale).
    `bad_weights` and `bad_buffers` are the non-finite tensors of the state dict: names that end in running_mean,
    running_var or num_batches_tracked, or that the file lists as buffers, count as buffers. `missing` says, one
    sentence each, what a full replay would need and how to save it next time; `notes` say which weights were chosen
    and what else the file holds.
    """

    path: str
    nbytes: int
    layout: Layout
    num_weights: int
    num_parameters: int
    arrays: tuple[ArraySummary, ...]
    scalars: tuple[tuple[str, str], ...]
    bad_weights: tuple[ArraySummary, ...]
    bad_buffers: tuple[ArraySummary, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFlags:
    """What went wrong in the step, according to the file: the non-finite `loss` (None: there was none), or `gradients`.

    `numbers` has a clause for each other number that shows it, as a norm of gradients that is NaN. `rank` of
    `num_ranks` wrote the file. `here` is False if the non-finite loss was another rank's.
    """

    loss: float | None = None
    gradients: bool = False
    numbers: tuple[str, ...] = ()
    here: bool = True
    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The versions, platform and device of a replay; `recorded_torch` is the training's if another."""

    nandoctor: str
    torch: str
    python: str
    platform: str
    device: str
    recorded_torch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSlot:
    """One parameter's running mean of squared gradients, with exact counts, in the format that its step is computed in.

    `parameter` is the dotted name, "" if the optimizer's order did not match the model's. `eps` is added to the root.
    `safe_eps` is the eps with which the optimizer's steps, in the format of the moments, are finite and least wrong;
    None if there is none.
    """

    parameter: str
    eps: float
    moment: TensorStats
    safe_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """An update that made weights non-finite although all gradients were finite.

    `optimizer` is its class, "" if the training loop itself wrote them. `parameters` maps the dotted names of those
    weights to the numbers of their non-finite values and of all values. `settings` are the numbers in the optimizer's
    groups (lr, weight_decay, ...). `largest_gradient` is a magnitude, None if the gradients were not checked.
    """

    optimizer: str
    parameters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    largest_gradient: float | None = None
