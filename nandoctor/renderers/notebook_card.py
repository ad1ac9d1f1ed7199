"""Render the report as an HTML fragment for a notebook cell.

One `<div>` without scripts or external files, in the colours of the surrounding page.
"""

from __future__ import annotations

from nandoctor.evidence.report import Report
from nandoctor.renderers.answer import make_answer
from nandoctor.renderers.facts import Fact, detail_facts, evidence_facts, next_facts, note_facts
from nandoctor.renderers.fix_facts import summarize_fixes
from nandoctor.renderers.table import make_table
from nandoctor.renderers.templating import render
from nandoctor.renderers.trial_facts import trial_facts
from nandoctor.renderers.verdicts import VERDICTS


def report_html(report: Report) -> str:
    """Return everything that the terminal prints, in the same order; names are escaped."""
    return render(
        "card.html.j2",
        report=report,
        answer=make_answer(report),
        tone=VERDICTS[report.verdict].tone,
        fixes=summarize_fixes(report),
        evidence=[*evidence_facts(report), *trial_facts(report)],
        table=make_table(report),
        last=[
            *detail_facts(report),
            *note_facts(report),
            *next_facts(report, page=False),
            Fact("more", 'case.save("report.html")', is_command=True),
        ],
    )
