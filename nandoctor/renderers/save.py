"""Writes a report to a file, in the form that the file's ending asks for.

In: a report and a path. Out: the file. Each renderer is imported only when its ending is asked for.
"""

from __future__ import annotations

from pathlib import Path

from nandoctor.evidence.report import Report

ENDINGS = (".json", ".html", ".md", ".png", ".svg", ".pdf")


def save_report(report: Report, path: Path) -> None:
    """Write the report (.json), the page (.html), Markdown (.md) or the ranges plot (.png, .svg, .pdf).

    Raises:
        NanDoctorError: there is no such form, there is nothing to draw, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix == ".json":
        from nandoctor.renderers.jsonfile import write_json

        write_json(report, path)
    elif suffix == ".html":
        from nandoctor.renderers.page import write_page

        write_page(report, path)
    elif suffix == ".md":
        from nandoctor.renderers.markdown import write_markdown

        write_markdown(report, path)
    else:
        from nandoctor.renderers.plots.figures import draw_ranges, save_figure

        save_figure(draw_ranges(report), path)
