"""Tells whether a step fails by one of several ops, by a run in which what the others made is finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nandoctor.autocast.policy import REFERENCE
from nandoctor.changes.running_op import RunningOp
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.edits import OpSite, SingleEdit
from nandoctor.evidence.trace import Trace
from nandoctor.tracing.tensor_stats import format_of

_ANY_NUMBER = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _MakeFinite(SingleEdit):
    """Put a number for what an op makes non-finite; for a run alone, it is no fix."""

    site: OpSite

    def on_ops(self) -> Iterator[tuple[OpSite, Callable[[RunningOp], Any]]]:
        yield self.site, lambda op: op.each(partial(_made_finite, in_place=op.is_mutable), op.run())

    def works_in_place(self, *, has_out: bool) -> bool:
        return True


def _made_finite(value: Any, *, in_place: bool) -> Any:
    if not isinstance(value, torch.Tensor) or format_of(value.dtype) is None:
        return value
    nonfinite = ~torch.isfinite(value)
    return value.masked_fill_(nonfinite, _ANY_NUMBER) if in_place else value.masked_fill(nonfinite, _ANY_NUMBER)


def fails_without(step: FailingStep, failing: Trace, sites: Sequence[OpSite]) -> bool:
    """Return True if the step fails as in the run `failing` though all that these ops make is finite; also in doubt."""
    policy = REFERENCE if failing.policy == REFERENCE.label else None
    changes = tuple(_MakeFinite(site=site) for site in sites)
    with suppress(ModelError, LossError):
        return step.run(policy, Watch(stage="closer look"), changes).trace.fails_as(failing)
    return True
