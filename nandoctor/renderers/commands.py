"""The next commands to type, complete: with the dump's path and the flags that its replay was given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from nandoctor.evidence.report import Report
from nandoctor.renderers.facts import Fact
from nandoctor.text import printable

_COMMAND = re.compile(r"(.*?)(?:(?:^|(?<=:) )(nandoctor [a-z]+ .+))?$", re.DOTALL)


def explain_command(report: Report) -> str | None:
    """What prints the page about the cause."""
    return None if report.cause is None else f"nandoctor explain {report.cause.code}"


def page_command(report: Report) -> str | None:
    """What writes the page with every layer."""
    return _command("replay", report, "-o report.html")


def fix_command(report: Report, *rest: str) -> str | None:
    """What applies the first verified fix, or another one as `rest` says."""
    return _command("fix", report, *(rest or ("--write",)))


def verify_command(report: Report) -> str | None:
    """What tells whether the step passes with the code as it is now."""
    return _command("verify", report)


def _command(verb: str, report: Report, *rest: str) -> str | None:
    if not report.arguments:
        return None
    return " ".join(["nandoctor", verb, *(shlex.quote(printable(word)) for word in report.arguments), *rest])


def plot_command(report: Report, kind: str) -> str | None:
    """What draws one kind of plot."""
    return _command("plot", report, f"--kind {kind}")


def next_facts(report: Report, *, page: bool = True) -> list[Fact]:
    """What to do and to type next, besides applying a fix; without the `page` where the reader has one."""
    facts = list(step_facts(report.next_steps))
    commands = filter(None, (explain_command(report), page_command(report) if page else None))
    return [*facts, *(Fact(label="more", text=command, is_command=True) for command in commands)]


def step_facts(steps: Sequence[str]) -> Iterator[Fact]:
    """What to do next; a command at the end of a sentence stands on a line of its own, to be copied."""
    for step in steps:
        sentence, command = _COMMAND.match(printable(step)).groups()  # type: ignore[union-attr]
        if sentence:
            yield Fact(label="next", text=sentence)
        if command:
            yield Fact(label="next", text=command, is_command=True)
