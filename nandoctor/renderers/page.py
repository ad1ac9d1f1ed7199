"""Render the report as one self-contained HTML page: no network, no framework.

All names from a dump are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Report
from nandoctor.evidence.trace import head_run
from nandoctor.renderers.answer import make_answer
from nandoctor.renderers.facts import detail_facts, evidence_facts, next_facts, note_facts
from nandoctor.renderers.fix_facts import list_fixes
from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.plots.affected_sample import caption, view_html
from nandoctor.renderers.plots.figures import figure_svg, for_page_and_phone
from nandoctor.renderers.plots.kinds import PLOTS, draw
from nandoctor.renderers.plots.origin import describe_spread, is_uniform
from nandoctor.renderers.table import make_tree
from nandoctor.renderers.templating import render
from nandoctor.renderers.trial_facts import trial_values
from nandoctor.renderers.verdicts import VERDICTS


def report_page(report: Report) -> str:
    """Return the page's HTML."""
    fixes = list_fixes(report)
    return render(
        "page.html.j2",
        report=report,
        answer=make_answer(report),
        tone=VERDICTS[report.verdict].tone,
        fixes=[fix for fix in fixes if fix.verified],
        others=[fix for fix in fixes if not fix.verified],
        evidence=[fact for fact in evidence_facts(report) if fact.label != "path"],  # shown link by link below
        details=[*detail_facts(report), *note_facts(report)],
        next_facts=next_facts(report, page=False),
        near=sorted(report.headroom, key=lambda near: near.headroom_bits),
        spread=describe_spread(report.origin.grid) if report.origin and report.origin.grid else "",
        sample=report.sample,
        sample_caption=caption(report.sample) if report.sample else "",
        sample_html=view_html(report.sample) if report.sample else "",
        plots=dict(_draw_plots(report)),
        tree=make_tree(report),
        run_heading=head_run(report.runs.autocast.policy, report.runs.autocast.dtype) if report.runs else "",
        markdown=report_markdown(report).splitlines(),
        **trial_values(report),
    )


def _draw_plots(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, by kind, the plots that this report has the numbers for: heading, finding in a sentence, and drawing."""
    for kind, plot in PLOTS.items():
        if kind == "origin" and is_uniform(report):
            continue
        try:
            figures = {kind: draw(report, kind), f"{kind}-narrow": draw(report, kind, narrow=True)}
        except NanDoctorError:
            continue
        finding = " ".join(figures[kind].get_suptitle().split())
        for figure in figures.values():
            figure.suptitle("")  # the page shows the finding as text that wraps
        drawings = (figure_svg(figure, prefix=prefix, title=finding) for prefix, figure in figures.items())
        yield kind, {"heading": plot.title, "finding": finding, "svg": for_page_and_phone(*drawings)}
