"""Show the progress of a replay as a rich bar with the time left."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from nandoctor.engine.progress import Listener
from nandoctor.text import plural, printable

_SEARCH = "Fixes"
_BAR_WIDTH = 6
_BEST_WIDTH = 24


class ReplayBar(Listener):
    """The bar of a replay: the layers of each run of the diagnosis, then the runs of the search for fixes."""

    def __init__(self, console: Console, *, shown: bool = True) -> None:
        super().__init__()
        self.display = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not shown,
        )
        self._phase = self.display.add_task("Loading", total=None, done="")
        self._shown = ""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show that a run of the diagnosis has done `done` layers, of `total` if that is known.

        Do nothing during the search for fixes, which counts whole runs.
        """
        if self._shown == _SEARCH:
            return
        if stage != self._shown:
            self._shown = stage
            self.display.reset(self._phase, description=f"Diagnosing: {printable(stage)}", total=total)
        layers = plural(done, "layer") if total is None else f"{done:,}/{plural(total, 'layer')}"
        self.show(completed=done, total=total, done=layers)

    def searched(self, num_runs: int, most_runs: float | None, best: str) -> None:
        """Show how many runs the search for fixes has made."""
        if self._shown != _SEARCH:
            self._shown = _SEARCH
            self.display.reset(self._phase, description=_SEARCH, done="")
        most = None if most_runs is None or math.isinf(most_runs) else most_runs
        limit = "" if most is None else f" of at most {most:,.0f}"
        found = Text(printable(best))
        found.truncate(_BEST_WIDTH, overflow="ellipsis")
        runs = f"{num_runs:,}{limit} runs{f', best: {found}' if best else ''}"
        self.show(completed=num_runs, total=most, done=runs)

    def show(self, **changed: Any) -> None:
        """Move the bar; where it is shown otherwise than on a terminal, show it."""
        self.display.update(self._phase, **changed)
