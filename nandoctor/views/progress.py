"""Show the progress of a replay: a bar, and the answer once it is known."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nandoctor.engine.progress import Listener
from nandoctor.evidence.report import Report
from nandoctor.text import plural, printable
from nandoctor.views.blocks import Block
from nandoctor.views.report import report_document
from nandoctor.views.terminal import print_document

_SEARCH = "Fixes"
_BAR_WIDTH = 6
_NUM_KNOWN = 2
"""So many blocks of a report are known before any search for fixes: the headline and the answer."""


class ReplayDisplay(Listener):
    """The display of a running replay: bars on standard error, the diagnosis on `output` once it is known.

    The bars are the layers of each run of the diagnosis, then the runs of the search for fixes, of which an interrupt
    gives the rest of the report. There is none if standard error is no terminal, whatever FORCE_COLOR says; a notebook
    draws them by ipywidgets. Without an `output` nothing is printed.
    """

    def __init__(self, output: Console | None = None) -> None:
        super().__init__()
        errors = Console(stderr=True)
        has_bar = find_spec("ipywidgets") is not None if errors.is_jupyter else errors.file.isatty()
        self.display = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(compact=True),
            console=errors,
            transient=True,
            disable=not has_bar or errors.is_dumb_terminal,
        )
        self._phase = self.display.add_task("Loading", total=None, done="")
        self._shown = ""
        self.stops_gently = output is not None or errors.is_jupyter
        self._output, self._num_told = output, 0

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
        self.display.update(self._phase, completed=done, total=total, done=layers)

    def searched(self, num_runs: int, most_runs: float | None) -> None:
        """Show how many runs the search for fixes has made."""
        if self._shown != _SEARCH:
            self._shown = _SEARCH
            self.display.reset(self._phase, description=_SEARCH, done="")
        most = None if most_runs is None or math.isinf(most_runs) else most_runs
        limit = "" if most is None else f" of at most {most:,.0f}"
        self.display.update(self._phase, completed=num_runs, total=most, done=f"{num_runs:,}{limit} runs")

    def tell(self, report: Report) -> None:
        """Print the answer, before any fix was tried, and go on to the bar of the search."""
        if self._output is not None:
            self.display.stop()
            with suppress(BrokenPipeError):  # files are still to be written
                print_document(islice(report_document(report), _NUM_KNOWN), self._output)
                self._output.file.flush()
            self._num_told = _NUM_KNOWN
            self.display.start()
        self.searched(0, None)

    def tell_rest(self, document: Iterable[Block]) -> None:
        """Print what `tell` has not printed of the report's document."""
        if self._output is not None:
            print_document(islice(document, self._num_told, None), self._output, goes_on=self._num_told > 0)

    @contextmanager
    def shown(self) -> Iterator[ReplayDisplay]:
        """Show the bar while the replay runs; what a model prints goes to standard error."""
        with redirect_stdout(sys.stderr), self.display:
            yield self
