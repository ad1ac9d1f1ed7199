"""The report in one line, for scripts, for editors and for checks on GitHub."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nandoctor.evidence.report import Report
from nandoctor.evidence.verdicts import NOTHING_FOUND
from nandoctor.text import printable


def one_line(report: Report) -> str:
    """The dump, the verdict and the headline, for `--quiet` and for scripts that read many."""
    return printable(f"{report.dump.path}: {report.verdict}: {report.headline}")


def concise_line(report: Report) -> str:
    """One line as compilers print them: "train.py:45: eps-underflow: 1e-8 rounds to 0 in fp16, ...".

    The dump stands first where no line is to blame.
    """
    where = report.dump.path if report.excerpt is None else f"{report.excerpt.path}:{report.excerpt.line}"
    return printable(f"{where}: {_code(report)}: {report.headline}")


def github_line(report: Report) -> str:
    """A workflow command that marks the line: an error, or a notice where nothing failed."""
    level = "notice" if report.verdict in NOTHING_FOUND else "error"
    properties = {"title": _code(report)}
    if report.excerpt is not None:
        properties = {
            "file": report.excerpt.path,
            "line": str(report.excerpt.line),
            "endLine": str(report.excerpt.end_line),
            **properties,
        }
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{level} {listed}::{_message(report.headline)}"


def _code(report: Report) -> str:
    return report.cause.code if report.cause is not None else report.verdict


def _message(text: str) -> str:
    """Escaped as GitHub's own toolkit does, so that no text can begin another command."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


LINES: Mapping[str, Callable[[Report], str]] = {"quiet": one_line, "concise": concise_line, "github": github_line}
"""By the names of the command line."""
