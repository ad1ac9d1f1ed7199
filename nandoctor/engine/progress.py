"""Reports how far the runs of a replay are."""

from __future__ import annotations

from collections.abc import Callable

from nandoctor.evidence.report import Report

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, module calls done, module calls in all or None if that is not known yet)."""


class Listener:
    """A listener to a replay that reports to a `Progress`; each run is a stage.

    A subclass can also take the diagnosis, and the progress of the search for fixes. With `stops_gently` an interrupt
    ends that search with the fixes that were found until then; `interrupted` is True if that happened.
    """

    stops_gently = False
    interrupted = False
    _stage = ""
    _num_calls: int | None = None  # of the run before, as the number to expect

    def __init__(self, progress: Progress = lambda *_: None) -> None:
        self._progress = progress

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report how far a run is, as a `Progress` does."""
        self._progress(stage, done, total)

    def begin(self, stage: str) -> None:
        """Report that a run begins."""
        self._stage = stage
        self(stage, 0, self._num_calls)

    def on_call(self, done: int) -> None:
        """Report that `done` module calls of the run have returned."""
        self(self._stage, done, self._num_calls)

    def end(self, num_calls: int) -> None:
        """Note that the run has ended after `num_calls` module calls."""
        self._num_calls = num_calls

    def tell(self, report: Report) -> None:
        """Report the diagnosis, before any fix was tried."""

    def searched(self, num_runs: int, most_runs: int | None) -> None:
        """Report the runs spent on fixes, and how many there may be."""

    def stop(self) -> bool:
        """Handle an interrupt; return True if what is known is to be reported."""
        self.interrupted = self.stops_gently
        return self.interrupted


def listener_of(progress: Progress) -> Listener:
    """Return `progress` if it is a listener, else a listener that reports to it."""
    return progress if isinstance(progress, Listener) else Listener(progress)
