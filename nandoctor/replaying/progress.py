"""Reports how far the runs of a replay are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nandoctor.text import number

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

LONG_S = 2.0
"""The length of a run from which on the time that the rest takes is worth reporting."""

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, module calls done, module calls in all or None if that is not known yet)."""


class Listener:
    """A listener to a replay that reports to a `Progress`; each run is a stage.

    A subclass can also take the diagnosis, and the progress of the search for fixes. With `stops_gently` an interrupt
    ends the replay with a report of what was found until then; `interrupted` is True if that happened.
    """

    stops_gently = False
    interrupted = False
    elapsed_s = 0.0  # of the last run
    _stage = ""
    _num_calls: int | None = None  # of the run before, as the number to expect
    _started_s = 0.0

    def __init__(self, progress: Progress = lambda *_: None) -> None:
        self._progress = progress

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report how far a run is, as a `Progress` does."""
        self._progress(stage, done, total)

    def begin(self, stage: str) -> None:
        """Report that a run begins."""
        self._started_s, self._stage = time.perf_counter(), stage
        self(stage, 0, self._num_calls)

    def on_call(self, done: int) -> None:
        """Report that `done` module calls of the run have returned."""
        self(self._stage, done, self._num_calls)

    def end(self, num_calls: int) -> None:
        """Note that the run has ended after `num_calls` module calls."""
        self.elapsed_s, self._num_calls = time.perf_counter() - self._started_s, num_calls

    def expected(self, forecast: str) -> None:
        """Report the least memory that a large model takes, before it is built, or the time left after a long run."""

    def expect_rest(self, num_runs: float) -> None:
        """Report the time left if the last run was long; the rest of the diagnosis takes `num_runs` times as long."""
        if self.elapsed_s >= LONG_S:
            self.expected(f"the diagnosis in roughly {number(max(round(num_runs * self.elapsed_s), 1))} s")

    def tell(self, report: Report) -> None:
        """Report the diagnosis, before any fix was tried."""

    def close(self) -> None:
        """Clean up after the replay, however it ended."""

    def searched(self, num_runs: int, most_runs: int | None, best: str) -> None:
        """Report the runs spent on fixes, how many there may be, and the title of the first verified fix."""

    def stop(self) -> bool:
        """Handle an interrupt; return True if what is known is to be reported."""
        self.interrupted = self.stops_gently
        return self.interrupted


def listener_of(progress: Progress) -> Listener:
    """Return `progress` if it is a listener, else a listener that reports to it."""
    return progress if isinstance(progress, Listener) else Listener(progress)
