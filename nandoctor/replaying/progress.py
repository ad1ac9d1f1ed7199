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
    """A `Progress`, or what hands on to one, that is told the diagnosis as well, and how the search for fixes gets on.

    With `stops_gently` an interrupt ends the replay, and the report has what was found until then; `interrupted` tells
    that this happened.
    """

    stops_gently = False
    interrupted = False

    def __init__(self, progress: Progress = lambda *_: None) -> None:
        self._progress = progress

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Hear how far a run is, as a `Progress` does."""
        self._progress(stage, done, total)

    def expected(self, forecast: str) -> None:
        """Hear what memory a large model takes at least, before it is built; after a long run, what time is left."""

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


class RunProgress:
    """Reports each run as a stage, with the number of calls that the run before it made as the number to expect."""

    def __init__(self, progress: Progress = lambda *_: None) -> None:
        self._listener = progress if isinstance(progress, Listener) else Listener(progress)
        self._stage = ""
        self._num_calls: int | None = None
        self._started = self.elapsed_s = 0.0
        self.interrupted = False

    def expect(self, forecast: str) -> None:
        """Hand on what the replay will take."""
        self._listener.expected(forecast)

    def expect_rest(self, num_runs: float) -> None:
        """Tell how long the diagnosis still takes, where the last run was long: so many times that."""
        if self.elapsed_s >= LONG_S:
            self.expect(f"the diagnosis in roughly {number(max(round(num_runs * self.elapsed_s), 1))} s")

    def begin(self, stage: str) -> None:
        """Start a stage."""
        self._started = time.perf_counter()
        self._stage = stage
        self._listener(stage, 0, self._num_calls)

    def on_call(self, done: int) -> None:
        """Report that `done` module calls have returned."""
        self._listener(self._stage, done, self._num_calls)

    def stop(self) -> bool:
        """Pass an interrupt on, and tell whether to report what is known; `interrupted` then is True."""
        self.interrupted = self._listener.stop()
        return self.interrupted

    def end(self, num_calls: int) -> None:
        """Remember how many calls the run made, and how long it took."""
        self.elapsed_s = time.perf_counter() - self._started
        self._num_calls = num_calls
