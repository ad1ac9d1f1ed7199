"""`Dump`: one saved failing step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nandoctor.dumps.array_roles import is_loss
from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.dumps.signature import Provenance
from nandoctor.evidence.dump_summary import Layout, SavedFlags

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A state dict, the arrays that stood beside it, and the plain values.

    `state` maps parameter and buffer names to tensors on the CPU; `state_name` is where it stood in the file, "" for
    the file itself; `other_states` are those beside it, by their names. `prefix` is what wrappers had put before every
    name and the reader removed (`module.`, `_orig_mod.`); a Lightning checkpoint's `model.` stays, since a model may
    have an attribute of that name.
    `arrays` maps names to tensors of one dimension and more, in the order of the file. `scalars` holds numbers,
    strings, booleans, None, flat lists of them, and 0-dim arrays as numbers. Both flatten nested containers with
    dotted names; `tree` has them in their containers, a `Slot` for each array. `rng_states` are the states of random
    generators, `moments` the second moments of the optimizer and `optimizer_eps` the eps of each of its groups of
    parameters. `left_out` names what the file holds besides: other weights, schedules, arrays of text. `recorded` is
    what a file of the recorder's own format says of the call and its environment, and `provenance` whether this user's
    own recorder wrote it; `missing` names what it could not hold. `other_weights`: `state` was read from another file
    (`notes` tell of it), and it is not, or may not be, that of the failing step.
    """

    path: Path
    nbytes: int
    layout: Layout
    state: Mapping[str, torch.Tensor]
    arrays: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    rng_states: tuple[torch.Tensor, ...] = ()
    moments: tuple[SecondMoment, ...] = ()
    optimizer_eps: tuple[float, ...] = ()
    prefix: str = ""
    state_name: str = ""
    other_states: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    tree: Any = None
    recorded: Recorded | None = None
    provenance: Provenance = field(default_factory=Provenance)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    other_weights: bool = False

    @property
    def holds_weights(self) -> bool:
        """False where they had no room in the file, or nobody put them there; a model may have none to put."""
        return self.layout != "batch-only" and (self.recorded is None or self.recorded.checkpoint is None)

    @property
    def losses(self) -> dict[str, float]:
        """The saved numbers whose names say that they are a loss."""
        return {name: value for name, value in self.scalars.items() if isinstance(value, float) and is_loss(name)}

    @property
    def saved_flags(self) -> SavedFlags:
        """What the recorder says went wrong; of any other file, a loss that is not finite."""
        if self.recorded is None:
            return SavedFlags(loss=next(filter(_is_nonfinite, self.losses.values()), None))
        loss, reason = self.scalars.get("loss"), self.scalars.get("reason")
        return SavedFlags(
            loss=loss if _is_nonfinite(loss) else None,
            gradients=reason in ("gradients", "skipped"),
            here=reason != "loss" or self.scalars.get("nonfinite_here") is not False,
            rank=self._count("rank", 0),
            num_ranks=self._count("world_size", 1),
        )

    @property
    def loss_scale(self) -> float | None:
        """The saved scale, a plain number or that of GradScaler's state; None where there is none that can be."""
        saved = [value for name, value in self.scalars.items() if name.rpartition(".")[2] in ("scale", "loss_scale")]
        scale = float(saved[0]) if saved and isinstance(saved[0], (int, float)) else math.nan
        return scale if math.isfinite(scale) and scale > 0 else None

    def _count(self, name: str, default: int) -> int:
        value = self.scalars.get(name)
        return value if type(value) is int else default


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
