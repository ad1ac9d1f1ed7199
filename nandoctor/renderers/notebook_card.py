"""The report as a fragment of HTML, for a notebook cell.

In: a `Report` or a record of one. Out: one `<div>` without scripts or outside files, in the colours of the page around.
"""

from __future__ import annotations

from collections.abc import Iterable

import jinja2

from nandoctor.evidence.report import Report
from nandoctor.renderers.facts import MEANINGS, tell
from nandoctor.renderers.fix_facts import list_cures, tell_cures
from nandoctor.renderers.table import make_table
from nandoctor.text import bits_text, printable

# Every colour is inherited, translucent, or text on its own ground, so that light and dark notebooks both read well.
_GOOD, _UNCLEAR, _BAD = "#00735a", "#8a6500", "#b04a00"
_COLORS = {"healthy": _GOOD, "not-reproduced": _UNCLEAR, "loss-scale": _UNCLEAR}
_TOLD_APART = ("cure", "patch", "or", "")


def report_html(report: Report) -> str:
    """The verdict, the facts, the first cure and the layers around the first bad one; names are escaped."""
    cures = [cure for cure in list_cures(report) if cure.verified]
    others = [fact for fact in tell_cures(report) if fact.label not in _TOLD_APART]
    return (
        _environment()
        .get_template("card.html.j2")
        .render(
            report=report,
            meaning=MEANINGS[report.verdict],
            color=_COLORS.get(report.verdict, _BAD),
            facts=[*tell(report), *others],
            cures=cures,
            table=make_table(report),
        )
    )


def rows_html(rows: Iterable[tuple[str, str]]) -> str:
    """A record as a small table of names and values."""
    return _environment().get_template("rows.html.j2").render(rows=list(rows))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nandoctor.renderers"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "bits_text": bits_text}
    return environment
