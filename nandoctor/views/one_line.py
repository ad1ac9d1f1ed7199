"""A report in one line, for scripts, editors and GitHub."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nandoctor.evidence.report import Report
from nandoctor.evidence.verdicts import NOTHING_FOUND
from nandoctor.text import printable


def one_line(report: Report) -> str:
    """Return one line as compilers print them: "train.py:45: eps-underflow: 1e-8 rounds to 0 in fp16, ...".

    It starts with the dump if no line is to blame.
    """
    where = report.dump.path if report.excerpt is None else f"{report.excerpt.path}:{report.excerpt.line}"
    return printable(f"{where}: {_code(report)}: {report.headline}")


def github_line(report: Report) -> str:
    """Return a workflow command that marks the line: an error, or a notice if nothing failed."""
    level = "notice" if report.verdict in NOTHING_FOUND else "error"
    properties = {"title": _code(report)}
    if (place := report.excerpt) is not None:
        properties = {"file": place.path, "line": str(place.line), "endLine": str(place.end_line), **properties}
    escaped = {name: _message(value).replace(":", "%3A").replace(",", "%2C") for name, value in properties.items()}
    listed = ",".join(f"{name}={value}" for name, value in escaped.items())
    return f"::{level} {listed}::{_message(report.headline)}"


def _code(report: Report) -> str:
    return report.cause.code if report.cause is not None else report.verdict


def _message(text: str) -> str:
    """Escape text as GitHub's own toolkit does, so that it cannot begin another command."""
    return printable(text).replace("%", "%25")


LINES: Mapping[str, Callable[[Report], str]] = {"concise": one_line, "github": github_line}
"""The one-line formats, by their names on the command line."""
