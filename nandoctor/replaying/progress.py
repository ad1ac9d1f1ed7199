"""How far the runs of one replay are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nandoctor.text import number

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

LONG_S = 2.0
"""A run from which on it is worth telling how long the rest takes."""

Progress = Callable[[str, int, int | None], None]
"""Told (stage, module calls done, module calls in all or None where that is not known yet)."""


class Listener:
    """Hears how a replay gets on, and hands that on to a `Progress`: each run is a stage of it.

    A subclass can also hear the diagnosis, and how the search for fixes gets on. With `stops_gently` an interrupt ends
    the replay, and the report has what was found until then; `interrupted` tells that this happened.
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
        """Hear how far a run is, as a `Progress` does."""
        self._progress(stage, done, total)

    def begin(self, stage: str) -> None:
        """Hear that a run begins."""
        self._started_s, self._stage = time.perf_counter(), stage
        self(stage, 0, self._num_calls)

    def on_call(self, done: int) -> None:
        """Hear that `done` module calls of the run have returned."""
        self(self._stage, done, self._num_calls)

    def end(self, num_calls: int) -> None:
        """Hear that the run has ended, and how many calls it made."""
        self.elapsed_s, self._num_calls = time.perf_counter() - self._started_s, num_calls

    def expected(self, forecast: str) -> None:
        """Hear what memory a large model takes at least, before it is built; after a long run, what time is left."""

    def expect_rest(self, num_runs: float) -> None:
        """Hear how many times the last run the rest of the diagnosis takes, which is worth telling of a long one."""
        if self.elapsed_s >= LONG_S:
            self.expected(f"the diagnosis in roughly {number(max(round(num_runs * self.elapsed_s), 1))} s")

    def tell(self, report: Report) -> None:
        """Hear the diagnosis, before any fix was tried."""

    def close(self) -> None:
        """Hear that the replay has ended, in whatever way."""

    def searched(self, num_runs: int, most_runs: int | None, best: str) -> None:
        """Hear how many runs were spent on fixes, how many there may be, and the title of the first verified one."""

    def stop(self) -> bool:
        """Hear of an interrupt, and tell whether to report what is known."""
        self.interrupted = self.stops_gently
        return self.interrupted


def listener_of(progress: Progress) -> Listener:
    """The progress itself where it is a listener, else one that hands on to it."""
    return progress if isinstance(progress, Listener) else Listener(progress)
