"""How far the runs of one replay are.

In: runs that begin and end, and module calls that return. Out: calls of the user's `Progress` function.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Told (stage, module calls done, module calls in all or None where that is not known yet)."""


class RunProgress:
    """Reports each run as a stage, with the number of calls that the run before it made as the number to expect."""

    def __init__(self, report: Progress = lambda *_: None) -> None:
        self._report = report
        self._stage = ""
        self._num_calls: int | None = None

    def begin(self, stage: str) -> None:
        """Start a stage."""
        self._stage = stage
        self._report(stage, 0, self._num_calls)

    def on_call(self, done: int) -> None:
        """Report that `done` module calls have returned."""
        self._report(self._stage, done, self._num_calls)

    def end(self, num_calls: int) -> None:
        """Remember how many calls the run made."""
        self._num_calls = num_calls
