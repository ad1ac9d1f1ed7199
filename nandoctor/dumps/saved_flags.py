"""Reads what a dump says of its loss and gradients.

In: the plain values of a `Dump`. Out: `SavedFlags`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nandoctor.dumps.dump import Dump
from nandoctor.evidence.saved_flags import SavedFlags


def read_flags(dump: Dump) -> SavedFlags:
    """The flags of a recorder's file; of any other, a non-finite number whose name says that it is a loss."""
    if dump.recorded is None:
        return SavedFlags(loss=next(filter(_is_nonfinite, saved_losses(dump.scalars).values()), None))
    event = dump.scalars
    loss, reason = event.get("loss"), event.get("reason")
    return SavedFlags(
        loss=loss if _is_nonfinite(loss) else None,
        gradients=reason in ("gradients", "skipped"),
        here=reason != "loss" or event.get("nonfinite_here") is not False,
        rank=_count(event.get("rank"), 0),
        num_ranks=_count(event.get("world_size"), 1),
    )


def saved_losses(scalars: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that are called a loss: "loss", "train_loss", "losses.total", not "loss_scale"."""
    numbers = {name: value for name, value in scalars.items() if isinstance(value, float)}
    return {name: value for name, value in numbers.items() if _is_loss(set(re.split(r"[\W_]+", name.lower())))}


def _is_loss(words: set[str]) -> bool:
    return bool(words & {"loss", "losses"}) and not words & {"scale", "scaler", "weight", "best", "min"}


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _count(value: Any, default: int) -> int:
    return value if type(value) is int else default
