"""Render the report as Markdown, fit for an issue.

Names from a dump or a model are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from markupsafe import Markup

from nandoctor.evidence.report import Report
from nandoctor.renderers.answer import make_answer
from nandoctor.renderers.facts import Fact, detail_facts, evidence_facts, next_facts, note_facts
from nandoctor.renderers.fix_facts import list_fixes
from nandoctor.renderers.table import make_table
from nandoctor.renderers.templating import render
from nandoctor.renderers.trial_facts import trial_values
from nandoctor.text import printable, split_code

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$])")
_LINKS = str.maketrans({"@": "&#64;", "#": "&#35;"})  # a backslash does not stop GitHub from mentioning people
_OPEN_FIXES = 2
_FENCE = re.compile(r"`{3,}")


def report_markdown(report: Report) -> str:
    """Return the cause, its place, the first fixes and the evidence; other fixes, layers and versions are folded."""
    fixes, answer = list_fixes(report), make_answer(report)
    open_fixes = [fix for fix in fixes if fix.verified][:_OPEN_FIXES]
    versions = {**asdict(report.environment), "dump": report.dump.path}
    text = render(
        "report.md.j2",
        escape=escape,
        answer=answer,
        headline=_with_code(answer.headline),
        open_fixes=open_fixes,
        others=[fix for fix in fixes if fix not in open_fixes],
        facts=[*evidence_facts(report), *detail_facts(report), *next_facts(report)],
        layers=make_table(report),
        versions=[*(Fact(name, text) for name, text in versions.items()), *note_facts(report)],
        command=_command,
        fenced=_fenced,
        **trial_values(report),
    )
    return f"{text.rstrip()}\n"


def escape(text: str) -> Markup:
    """Return the text as is: without markup, mentions, or links to other issues."""
    return Markup(_SPECIAL.sub(r"\\\1", printable(text).translate(_LINKS)))


def _with_code(text: str) -> Markup:
    """Return an escaped sentence with its code in backticks."""
    return Markup("").join(Markup(f"`{part}`") if is_code else escape(part) for part, is_code in split_code(text))


def _command(text: str) -> Markup:
    """Return a command as code for a table cell, or as text if it has a backtick or a bar, which ends the cell."""
    return escape(text) if "`" in text or "|" in text else Markup(f"`{printable(text)}`")


def _fenced(lines: Sequence[str], language: str) -> Markup:
    """Return lines in a code fence that is longer than any run of backticks in them."""
    fence = "`" * max([3, *(len(run) + 1 for line in lines for run in _FENCE.findall(line))])
    return Markup("\n".join([f"{fence}{language}", *lines, fence]))
