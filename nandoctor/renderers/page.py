"""The report as one HTML page that needs nothing else: no network, no framework.

In: a `Report`. Out: the text of the page, with styles, scripts and plots inside; whatever a dump named is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Report
from nandoctor.renderers.atomic_write import write_text
from nandoctor.renderers.facts import MEANINGS, tell
from nandoctor.renderers.fix_facts import describe_fp32_sets, list_constants, list_cures, list_trials
from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.plots.kinds import PLOTS, draw
from nandoctor.renderers.plots.svg import figure_svg
from nandoctor.renderers.tensors import describe_tensor
from nandoctor.renderers.tree import make_tree
from nandoctor.text import bits_text, byte_size, call_label, number, plural, printable, shape_text

TONES = {"healthy": "good", "not-reproduced": "unclear", "loss-scale": "unclear"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot of the page: its kind, a heading, and the drawing."""

    kind: str
    heading: str
    svg: Markup


def write_page(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page. Raises NanDoctorError if the file cannot be written."""
    write_text(report_page(report), Path(path))


def report_page(report: Report) -> str:
    """The whole page as text."""
    return (
        make_environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            meaning=MEANINGS[report.verdict],
            tone=TONES.get(report.verdict, "bad"),
            facts=[fact for fact in tell(report) if fact.label != "way"],  # told link by link below
            cures=list_cures(report),
            trials=list_trials(report),
            constants=list_constants(report),
            plots={plot.kind: plot for plot in _draw_plots(report)},
            tree=make_tree(report),
            markdown=report_markdown(report).splitlines(),
        )
    )


def make_environment() -> jinja2.Environment:
    """Templates in which every string is made printable and escaped, whoever wrote it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nandoctor.renderers"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        number, bits_text, byte_size, call_label, plural, shape_text, describe_fp32_sets, describe_tensor
    )  # fmt: skip
    environment.filters.update({function.__name__: function for function in filters})
    environment.filters |= {"share": _share}
    return environment


def _finalize(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _share(headroom: float, low: FloatFormat) -> int:
    """The headroom in per cent of a full bar, which values near one have."""
    return round(100 * min(max(headroom / (low.max_exponent + 1), 0.0), 1.0))


def _draw_plots(report: Report) -> Iterator[Plot]:
    """The plots that this report has the numbers for."""
    for kind, plot in PLOTS.items():
        try:
            figure = draw(report, kind)
        except NanDoctorError:
            continue
        yield Plot(kind=kind, heading=plot.title, svg=figure_svg(figure, prefix=kind))
