"""How much may be tried of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        whole = self.max_trials, self._time_s
        if self.max_trials is not None:
            self.max_trials -= int(share * max(self.max_trials - self.num_run, 0))
        if self._time_s is not None:
            self._time_s -= share * max(self._time_s - (time.monotonic() - self._started), 0.0)
        try:
            yield
        finally:
            self.max_trials, self._time_s = whole
