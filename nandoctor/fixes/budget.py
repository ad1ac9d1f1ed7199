"""The budget of trials of one step."""

from __future__ import annotations

import time


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
