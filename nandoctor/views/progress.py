"""Show the progress of a replay, on a terminal or below a notebook's cell: a bar, and the answer once it is known."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from nandoctor.engine.progress import Listener
from nandoctor.evidence.report import Report
from nandoctor.text import plural, printable
from nandoctor.views.blocks import Block
from nandoctor.views.report import report_document
from nandoctor.views.terminal import print_document

_SEARCH = "Fixes"
_BAR_WIDTH = 6
_BEST_WIDTH = 24
_NUM_KNOWN = 2
"""So many blocks of a report are known before any search for fixes: the headline and the answer."""


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


class ReplayDisplay(ReplayBar):
    """The display of a running replay: bars on standard error, the diagnosis on `output` once it is known.

    An interrupt of the search gives the rest of the report. There is no bar if standard error is no terminal, whatever
    FORCE_COLOR says. Without an `output` nothing is printed.
    """

    def __init__(self, output: Console | None = None) -> None:
        errors = Console(stderr=True)
        super().__init__(errors, shown=errors.file.isatty() and not errors.is_dumb_terminal)
        self.stops_gently = output is not None
        self._output, self._num_told = output, 0

    def tell(self, report: Report) -> None:
        """Print the answer, before any fix was tried, and go on to the bar of the search."""
        if self._output is not None:
            self.display.stop()
            with suppress(BrokenPipeError):  # files are still to be written
                print_document(islice(report_document(report), _NUM_KNOWN), self._output)
                self._output.file.flush()
            self._num_told = _NUM_KNOWN
            self.display.start()
        self.searched(0, None, "")

    def tell_rest(self, document: Iterable[Block]) -> None:
        """Print what `tell` has not printed of the report's document."""
        if self._output is not None:
            print_document(islice(document, self._num_told, None), self._output, goes_on=self._num_told > 0)

    @contextmanager
    def shown(self) -> Iterator[ReplayDisplay]:
        """Show the bar while the replay runs; what a model prints goes to standard error."""
        with redirect_stdout(sys.stderr), self.display:
            yield self


_NOTEBOOK_WIDTH = 100
_UPDATE_S = 0.2


def is_notebook() -> bool:
    """Return True if there is a front end that can replace an output, as Jupyter's."""
    get_ipython: Callable[[], Any] = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class NotebookProgress(ReplayBar):
    """A listener that shows a replay below its cell: the bar, and the diagnosis once it is known."""

    stops_gently = True

    def __init__(self) -> None:
        self._text = Console(file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False)
        super().__init__(self._text)
        self._card = ""
        self._shown_s = -math.inf
        self._output = sys.modules["IPython.display"].display({"text/plain": ""}, raw=True, display_id=True)

    def tell(self, report: Report) -> None:
        """Show the diagnosis above the bar of the search."""
        from nandoctor.views.html import card_of  # noqa: PLC0415 - a terminal needs no jinja2

        self._card, self._shown_s = card_of(report_document(report)), -math.inf
        self.searched(0, None, "")

    def close(self) -> None:
        """Empty the output: the cell's own result shows the whole report."""
        self._output.update({"text/plain": ""}, raw=True)

    def show(self, **changed: Any) -> None:
        """Move the bar, and put its text in place of the cell's output."""
        super().show(**changed)
        if time.monotonic() - self._shown_s < _UPDATE_S:
            return
        self._shown_s = time.monotonic()
        with self._text.capture() as line:
            self._text.print(self.display.get_renderable())
        text = line.get().rstrip()
        self._output.update({"text/plain": text, "text/html": f"{self._card}<pre>{text}</pre>"}, raw=True)
