"""Show the records of a report in a notebook, as small tables, and the progress of a replay."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from nandoctor.evidence.report import Cause, FirstNonfinite, Fix, Origin, Report
from nandoctor.evidence.report_diff import Comparison
from nandoctor.evidence.trace import TensorStats
from nandoctor.renderers.diff import describe_change, describe_layers
from nandoctor.renderers.facts import describe_extent, describe_inputs, describe_origin, describe_tensor, list_operands
from nandoctor.renderers.fix_facts import describe_outcome, every_check, reason_facts
from nandoctor.renderers.notebook_card import report_html
from nandoctor.renderers.progress import ReplayBar
from nandoctor.renderers.templating import render
from nandoctor.renderers.verification import code_of_fix
from nandoctor.replaying.progress import Listener
from nandoctor.text import file_line, number, printable, samples_text

_WIDTH = 100
_UPDATE_S = 0.2


def show_records() -> None:
    """Let IPython show records by `record_html` and tensors by `describe_tensor`; do nothing outside of IPython."""
    shell = _find_shell()
    if shell is None:
        return
    html, plain = (shell.display_formatter.formatters[kind] for kind in ("text/html", "text/plain"))
    for cls in _SHOWN:
        html.for_type(cls, record_html)
        plain.for_type(cls, lambda record, printer, _: printer.text(record_line(record)))
    plain.for_type(TensorStats, lambda stats, printer, _: printer.text(describe_tensor(stats)))


def is_notebook() -> bool:
    """Return True if there is a front end that can replace an output, as Jupyter's."""
    return getattr(_find_shell(), "kernel", None) is not None


def _find_shell() -> Any:
    get_ipython: Callable[[], Any] | None = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def record_html(record: Any) -> str:
    """Return a record as a small HTML table of names and values, worded as on the other surfaces."""
    rows_of, _ = _SHOWN[type(record)]
    return render("rows.html.j2", rows=list(rows_of(record)))


def record_line(record: Any) -> str:
    """Return a record in one line, for front ends without HTML."""
    _, line_of = _SHOWN[type(record)]
    return printable(line_of(record))


def _first_rows(first: FirstNonfinite) -> Iterator[tuple[str, str]]:
    yield "place", first.place.with_type
    if first.seen_in is not None:
        yield "before the call of", first.seen_in.label
    yield "extent", describe_extent(first)
    if first.inputs:
        yield "input", describe_inputs(first.inputs)
    if first.would_be is not None:
        yield "in fp32", f"up to {number(first.would_be)}"


def _origin_rows(origin: Origin) -> Iterator[tuple[str, str]]:
    yield "origin", describe_origin(origin)
    if origin.source is not None:
        yield "line", f"{file_line(origin.source.file, origin.source.line)}: {origin.source.text}"
    if origin.elements.samples:
        yield "where", samples_text(origin.elements.samples, origin.output.shape[0] if origin.output else None)
    if origin.would_be is not None:
        yield "in float64", number(origin.would_be)
    yield from list_operands(origin)


def _cause_rows(cause: Cause) -> Iterator[tuple[str, str]]:
    yield "cause", f"{cause.code}: {cause.title}"
    yield "why", cause.explanation
    yield from (("evidence", evidence.text) for evidence in cause.evidence)


def _fix_rows(fix: Fix) -> Iterator[tuple[str, str]]:
    yield "fix", fix.title
    yield "patch", code_of_fix(fix)
    yield "result", describe_outcome(fix.outcome)
    yield from ((fact.label, fact.text) for fact in (*every_check(fix), *reason_facts(fix)))


def _comparison_rows(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield comparison.outcome, comparison.headline
    yield from (("before", comparison.before), ("after", comparison.after))
    yield from ((change.name, describe_change(change)) for change in comparison.changes)
    yield "layers", describe_layers(comparison)


_SHOWN: Mapping[type, tuple[Callable[[Any], Iterator[tuple[str, str]]], Callable[[Any], str]]] = {
    FirstNonfinite: (_first_rows, lambda first: f"{first.place.with_type}: {describe_tensor(first.value)}"),
    Origin: (_origin_rows, describe_origin),
    Cause: (_cause_rows, lambda cause: f"{cause.code}: {cause.explanation}"),
    Fix: (_fix_rows, lambda fix: fix.title),
    Comparison: (_comparison_rows, lambda comparison: comparison.headline),
}
"""For each record class, the functions that render it as rows and as one line."""


class NotebookProgress(Listener):
    """A listener that shows a replay below its cell: the bar, and the diagnosis once it is known."""

    stops_gently = True

    def __init__(self) -> None:
        self._text = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        self._bar = ReplayBar(self._text)
        self._card = ""
        self._shown_s = -math.inf
        self._output = sys.modules["IPython.display"].display({"text/plain": ""}, raw=True, display_id=True)

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move the bar of the diagnosis."""
        self._bar.run(stage, done, total)
        self._show()

    def tell(self, report: Report) -> None:
        """Show the diagnosis above the bar of the search."""
        self._card, self._shown_s = report_html(report), -math.inf
        self.searched(0, None, "")

    def searched(self, num_runs: int, most_runs: int | None, best: str) -> None:
        """Move the bar of the search."""
        self._bar.search(num_runs, most_runs, best)
        self._show()

    def close(self) -> None:
        """Empty the output: the cell's own result shows the whole report."""
        self._output.update({"text/plain": ""}, raw=True)

    def _show(self) -> None:
        if time.monotonic() - self._shown_s < _UPDATE_S:
            return
        self._shown_s = time.monotonic()
        with self._text.capture() as line:
            self._text.print(self._bar.display.get_renderable())
        text = line.get().rstrip()
        self._output.update({"text/plain": text, "text/html": f"{self._card}<pre>{text}</pre>"}, raw=True)
