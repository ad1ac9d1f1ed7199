"""The budget of trials of one step, and the early end of a trial that cannot show anything more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any

import torch
from torch import nn

from nandoctor.diagnosis.conclusion import Findings
from nandoctor.evidence.trace import ModuleCall
from nandoctor.ops import MAXIMA, MINIMA, SELECTIONS
from nandoctor.process_wide import held
from nandoctor.torch_compat import plain_torch
from nandoctor.tracing.tensor_tree import walk_tensors


class BudgetSpent(Exception):  # noqa: N818  (an end, not an error)
    """No further trial may be run."""


class TrialBudget:
    """The budget for trying changes of one step: `max_trials` runs within `time_s` seconds from its creation.

    `out_of_memory`: a run did not fit into memory, so none was tried after it.
    """

    def __init__(self, max_trials: int | None = None, time_s: float | None = None) -> None:
        self.max_trials, self._time_s = max_trials, time_s
        self._started = time.monotonic()
        self.num_run = 0
        self.out_of_memory = False

    def spend(self) -> None:
        """Count one more run; raise BudgetSpent if the budget is used up."""
        elapsed_s = time.monotonic() - self._started
        too_many = self.max_trials is not None and self.num_run >= self.max_trials
        if too_many or (self._time_s is not None and elapsed_s > self._time_s):
            raise BudgetSpent
        self.num_run += 1

    @contextmanager
    def holding_back(self, share: float) -> Iterator[None]:
        """Limit the budget in this context so that this share of what is left now remains."""
        trials, time_s = self.max_trials, self._time_s
        if trials is not None:
            trials -= int(share * max(trials - self.num_run, 0))
        if time_s is not None:
            time_s -= share * max(time_s - (time.monotonic() - self._started), 0.0)
        with held((self, "max_trials", trials), (self, "_time_s", time_s)):
            yield


CallKey = tuple[str, int]
"""The path of a module and the index of its call, counted from 0."""


class TrialEnded(BaseException):
    """A module call returned nothing but NaN; not an Exception, so that the user's code does not catch it."""


def find_lost_call(findings: Findings) -> CallKey | None:
    """Return the first module call after which the failing step has only NaN left; None if that is not certain.

    Its output is all NaN, it lies on the path from the only origin to the output, and no later op on that path selects
    values. A changed step whose call returns all NaN too therefore ends in NaN.
    """
    trace, conclusion = findings.trace, findings.conclusion
    if findings.verdict != "precision" or len(conclusion.suspects) != 1 or len(conclusion.diagnoses) != 1:
        return None
    rest = takewhile(lambda link: link.op not in SELECTIONS | MAXIMA | MINIMA, reversed(conclusion.chain))
    keys = {link.place.key for link in rest}
    lost = [call for call in trace.calls if call.leave is not None and call.key in keys and _gave_nan(call)]
    return min(lost, key=lambda call: call.leave or 0).key if lost else None


def _gave_nan(call: ModuleCall) -> bool:
    counts = [(stats.counts.num_nan if stats.counts else 0, stats.numel) for stats in call.outputs]
    return bool(counts) and all(0 < num_nan == numel for num_nan, numel in counts)


@contextmanager
def ending_where_lost(model: nn.Module, lost_at: CallKey | None) -> Iterator[None]:
    """Raise TrialEnded, within this context for one run, if the call returns nothing but NaN."""
    if lost_at is None:
        yield
        return
    path, number = lost_at
    calls = count()

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if next(calls) == number and _all_nan(output):
            raise TrialEnded

    # nn.Module's method, because a ScriptModule refuses hooks, which its graph could not keep.
    with nn.Module.register_forward_hook(dict(model.named_modules())[path], end):
        yield


def _all_nan(output: Any) -> bool:
    with plain_torch():
        tensors = [tensor for _, tensor in walk_tensors(output)]
        return bool(tensors) and all(
            tensor.is_floating_point() and tensor.numel() > 0 and bool(torch.isnan(tensor).all()) for tensor in tensors
        )
