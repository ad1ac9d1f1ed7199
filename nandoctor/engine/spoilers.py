"""Tells whether a step fails by one of several ops, by a run in which what the others made is finite."""

from __future__ import annotations

from collections.abc import Sequence
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
from nandoctor.tracing.op_analysis import find_passed_on
from nandoctor.tracing.tensor_stats import all_finite, format_of, numbers_in
from nandoctor.trees import tree_map

_ANY_NUMBER = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _MakeFinite(SingleEdit):
    """Put a number for the NaN and Inf that an op makes, but not for what it was given; for a run alone, no fix."""

    site: OpSite

    def run(self, op: RunningOp) -> Any:
        taken = [values for _, tensor in op.tensors() if (values := numbers_in(tensor)) is not None]
        given = [values.clone() for values in taken if not all_finite(values)]  # before it is written to
        return tree_map(partial(_made_finite, op, given), op.run())

    def works_in_place(self, *, has_out: bool) -> bool:
        return True


def _made_finite(op: RunningOp, given: Sequence[torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or format_of(value.dtype) is None:
        return value
    passed_on = find_passed_on(op.name, given, value)
    if passed_on is None:  # what was given may be anywhere
        return value
    made = ~torch.isfinite(value) & ~passed_on
    return value.masked_fill_(made, _ANY_NUMBER) if op.is_mutable else value.masked_fill(made, _ANY_NUMBER)


def fails_without(step: FailingStep, failing: Trace, sites: Sequence[OpSite]) -> bool:
    """Return True if the step fails as in the run `failing` though all that these ops make is finite; also in doubt."""
    policy = REFERENCE if failing.policy == REFERENCE.label else None
    with suppress(ModelError, LossError):
        edits = [_MakeFinite(site=site) for site in sites]
        return step.run(policy, Watch(stage="closer look"), edits).trace.fails_as(failing)
    return True


def gradients_fail_without(step: FailingStep, sites: Sequence[OpSite]) -> bool:
    """Return True if gradients are non-finite though all that these ops make is finite; False in doubt."""
    watch = Watch(stage="closer look", statistics="none", backward=True, ends_early=True)
    with suppress(ModelError, LossError):
        return bool(step.run(None, watch, [_MakeFinite(site=site) for site in sites]).trace.bad_gradients)
    return False
