"""How much may be tried of one step, and the early end of a trial in which nothing is left to learn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
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
    """How much may still be tried of one step: at most `max_trials` runs, in at most `time_s` seconds from now on.

    `out_of_memory`: a run did not fit into memory, and none was tried after it.
    """

    def __init__(self, max_trials: int | None = None, time_s: float | None = None) -> None:
        self.max_trials, self._time_s = max_trials, time_s
        self._started = time.monotonic()
        self.num_run = 0
        self.out_of_memory = False

    def spend(self) -> None:
        """Pay for one more run; raise BudgetSpent where that is too much."""
        elapsed_s = time.monotonic() - self._started
        too_many = self.max_trials is not None and self.num_run >= self.max_trials
        if too_many or (self._time_s is not None and elapsed_s > self._time_s):
            raise BudgetSpent
        self.num_run += 1

    @contextmanager
    def holding_back(self, share: float) -> Iterator[None]:
        """A context that may spend all that is left but this share of it."""
        trials, time_s = self.max_trials, self._time_s
        if trials is not None:
            trials -= int(share * max(trials - self.num_run, 0))
        if time_s is not None:
            time_s -= share * max(time_s - (time.monotonic() - self._started), 0.0)
        with held((self, "max_trials", trials), (self, "_time_s", time_s)):
            yield


CallKey = tuple[str, int]
"""The path of a module, and the number of the call, counted from 0."""


class TrialEnded(BaseException):
    """A module call gave nothing but NaN; the user's code must not catch it as an error."""


def find_lost_call(findings: Findings) -> CallKey | None:
    """The first module call after which the failing step had nothing but NaN left; None where that is not sure.

    Its output is NaN throughout, it lies on the way from the only origin to the output, and no op on the rest of that
    way selects values: with as many NaN again the step ends in NaN again, whatever was changed before.
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
    """A context in which TrialEnded is raised where this call gives nothing but NaN; it is for one run."""
    if lost_at is None:
        yield
        return
    path, number = lost_at
    num_returned = 0

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal num_returned
        num_returned += 1
        if num_returned == number + 1 and _all_nan(output):
            raise TrialEnded

    # Module's own method: a ScriptModule refuses hooks, which its graph could not keep.
    with nn.Module.register_forward_hook(dict(model.named_modules())[path], end):
        yield


def _all_nan(output: Any) -> bool:
    with plain_torch():
        tensors = [tensor for _, tensor in walk_tensors(output)]
        return bool(tensors) and all(
            tensor.is_floating_point() and tensor.numel() > 0 and bool(torch.isnan(tensor).all()) for tensor in tensors
        )
