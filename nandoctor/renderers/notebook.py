"""How a notebook shows the records of a report, as small tables, and a replay while it runs."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from nandoctor.evidence.report import Cause, FirstNonfinite, Fix, Origin, Report
from nandoctor.evidence.report_diff import Change, Comparison
from nandoctor.evidence.serialization import is_inlined
from nandoctor.evidence.trace import Place, SourceLine, TensorStats
from nandoctor.renderers.diff import describe_change
from nandoctor.renderers.facts import describe_origin
from nandoctor.renderers.fix import code_of
from nandoctor.renderers.fix_facts import describe_outcome, every_check
from nandoctor.renderers.fix_reasons import reason_facts
from nandoctor.renderers.notebook_card import report_html, rows_html
from nandoctor.renderers.progress import ReplayBar
from nandoctor.renderers.tensors import describe_tensor, list_operands
from nandoctor.replaying.progress import Listener
from nandoctor.text import file_line, kinds_text, number, printable

_LEFT_OUT = frozenset({"grid", "layers", "schema", "nth"})
_MAX_ITEMS = 8
_WIDTH = 100
_UPDATE_S = 0.2


def show_records() -> None:
    """Let IPython show records by `record_html` and tensors by `describe_tensor`; nothing outside of IPython."""
    shell = _find_shell()
    if shell is None:
        return
    html, plain = (shell.display_formatter.formatters[kind] for kind in ("text/html", "text/plain"))
    for cls in (FirstNonfinite, Origin, Cause, Fix, Comparison):
        html.for_type(cls, record_html)
        plain.for_type(cls, lambda record, printer, _: printer.text(record_line(record)))
    plain.for_type(TensorStats, lambda stats, printer, _: printer.text(describe_tensor(stats)))


def is_notebook() -> bool:
    """Tell whether there is a front end that can replace an output, as Jupyter's."""
    return getattr(_find_shell(), "kernel", None) is not None


def _find_shell() -> Any:
    get_ipython: Callable[[], Any] | None = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def record_html(record: Any) -> str:
    """The fields of a record that say something, one row each."""
    return rows_html(_rows(record))


def record_line(record: Any) -> str:
    """A record in one line, for where there is no HTML."""
    if isinstance(record, Origin):
        return describe_origin(record)
    if isinstance(record, Cause):
        return printable(f"{record.code}: {record.explanation}")
    if isinstance(record, FirstNonfinite):
        return printable(f"{record.place.with_type}: {describe_tensor(record.value)}")
    return printable(str(getattr(record, "headline", None) or record.title))


def _rows(record: Any) -> Iterator[tuple[str, str]]:
    if isinstance(record, Fix):
        yield "fix", record.title
        yield "patch", code_of(record)
        yield "result", describe_outcome(record.outcome)
        yield from ((fact.label, fact.text) for fact in (*every_check(record), *reason_facts(record)))
        return
    if isinstance(record, Origin):
        yield "", describe_origin(record)
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if isinstance(record, Origin) and item.name in ("inputs", "output"):
            yield from list_operands(record) if item.name == "inputs" else ()
        elif is_inlined(item) and not isinstance(value, Place):
            yield from _rows(value)
        elif item.name not in _LEFT_OUT and value is not None and value not in ((), ""):
            yield item.name.replace("_", " "), _describe(item.name, value)


def _describe(name: str, value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, TensorStats):
        return describe_tensor(value)
    if isinstance(value, Place):
        return value.with_type
    if isinstance(value, SourceLine):
        return f"{file_line(value.file, value.line)}: {value.text}"
    if isinstance(value, tuple):
        items = [_describe(name, item) for item in value[:_MAX_ITEMS]]
        separator = "; " if dataclasses.is_dataclass(value[0]) else ", "
        more = [f"and {len(value) - _MAX_ITEMS} more"] if len(value) > _MAX_ITEMS else []
        return kinds_text(value) if name == "kinds" else separator.join([*items, *more])
    if isinstance(value, float):
        return number(value)
    return _describe_record(value) if dataclasses.is_dataclass(value) else str(value)


def _describe_record(record: Any) -> str:
    if hasattr(record, "finite"):
        return describe_outcome(record)
    return f"{record.name}: {describe_change(record)}" if isinstance(record, Change) else str(record.text)


class NotebookProgress(Listener):
    """Shows a replay below its cell: the bar, and the diagnosis from when it is known until the fixes are."""

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
        """Empty the output: what the cell gives is the whole report."""
        self._output.update({"text/plain": ""}, raw=True)

    def _show(self) -> None:
        if time.monotonic() - self._shown_s < _UPDATE_S:
            return
        self._shown_s = time.monotonic()
        with self._text.capture() as line:
            self._text.print(self._bar.display.get_renderable())
        text = line.get().rstrip()
        self._output.update({"text/plain": text, "text/html": f"{self._card}<pre>{text}</pre>"}, raw=True)
