"""The report as a fragment of HTML, for a notebook cell.

In: a `Report` or a record of one. Out: one `<div>` without scripts or outside files, in the colours of the page around.
"""

from __future__ import annotations

from collections.abc import Iterable

from nandoctor.evidence.report import Report
from nandoctor.renderers.facts import list_facts
from nandoctor.renderers.fix_facts import fix_facts, list_fixes
from nandoctor.renderers.table import make_table
from nandoctor.renderers.templating import render
from nandoctor.renderers.verdicts import VERDICTS

_SHOWN_APART = ("fix", "patch", "or", "")


def report_html(report: Report) -> str:
    """The verdict, the facts, the first fix and the layers around the first non-finite one; names are escaped."""
    fixes = [fix for fix in list_fixes(report) if fix.verified]
    others = [fact for fact in fix_facts(report) if fact.label not in _SHOWN_APART]
    return render(
        "card.html.j2",
        report=report,
        verdict=VERDICTS[report.verdict],
        facts=[*list_facts(report), *others],
        fixes=fixes,
        table=make_table(report),
    )


def rows_html(rows: Iterable[tuple[str, str]]) -> str:
    """A record as a small table of names and values."""
    return render("rows.html.j2", rows=list(rows))
