"""The display of a running replay: a bar, and the answer once it is known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from rich.console import Console

from nandoctor.views.progress import ReplayBar

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

_NUM_KNOWN = 2
"""So many blocks of a report are known before any search for fixes: the headline and the answer."""


class ReplayDisplay(ReplayBar):
    """The display of a running replay: bars on standard error, the diagnosis on `output` once it is known.

    `num_told` is the number of the report's blocks that are printed; an interrupt of the search gives the rest of them.
    There is no bar if standard error is not a terminal. Without an `output` nothing is printed.
    """

    def __init__(self, output: Console | None = None) -> None:
        errors = Console(stderr=True)
        super().__init__(errors, shown=errors.is_terminal and not errors.is_dumb_terminal)
        self.num_told = 0
        self.stops_gently = output is not None
        self._output = output

    def tell(self, report: Report) -> None:
        """Print the answer, before any fix was tried, and go on to the bar of the search."""
        if self._output is not None:
            from nandoctor.views.document import document
            from nandoctor.views.terminal import print_document

            self.display.stop()
            print_document(document(report)[:_NUM_KNOWN], self._output)
            self._output.file.flush()
            self.num_told = _NUM_KNOWN
            self.display.start()
        self.searched(0, None, "")

    @contextmanager
    def shown(self) -> Iterator[ReplayDisplay]:
        """Show the bar while the replay runs; what a model prints goes to standard error."""
        with redirect_stdout(sys.stderr), self.display:
            yield self
