"""Show the progress of a replay in a notebook."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from nandoctor.evidence.report import Report
from nandoctor.views.html import card_of
from nandoctor.views.progress import ReplayBar

_WIDTH = 100
_UPDATE_S = 0.2


def is_notebook() -> bool:
    """Return True if there is a front end that can replace an output, as Jupyter's."""
    get_ipython: Callable[[], Any] = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class NotebookProgress(ReplayBar):
    """A listener that shows a replay below its cell: the bar, and the diagnosis once it is known."""

    stops_gently = True

    def __init__(self) -> None:
        self._text = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        super().__init__(self._text)
        self._card = ""
        self._shown_s = -math.inf
        self._output = sys.modules["IPython.display"].display({"text/plain": ""}, raw=True, display_id=True)

    def tell(self, report: Report) -> None:
        """Show the diagnosis above the bar of the search."""
        self._card, self._shown_s = card_of(report), -math.inf
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
