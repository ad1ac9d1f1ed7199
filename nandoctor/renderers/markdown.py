"""The report as Markdown, fit for an issue.

Names from a dump or a model are text and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nandoctor.evidence.report import Report
from nandoctor.renderers.answer import make_answer
from nandoctor.renderers.facts import Fact, detail_facts, evidence_facts, next_facts, note_facts
from nandoctor.renderers.fix_facts import (
    ShownFix,
    fp32_facts,
    list_fixes,
    list_variations,
    no_fix_heading,
    varied_part,
    why_facts,
)
from nandoctor.renderers.table import CONSTANT_HEADINGS, LayerTable, list_small_constants, make_table
from nandoctor.text import bits_text, plural, printable, split_code

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$])")
_LINKS = str.maketrans({"@": "&#64;", "#": "&#35;"})  # a backslash does not stop GitHub from calling somebody
_OPEN_FIXES = 2
_FENCE = re.compile(r"`{3,}")


def report_markdown(report: Report) -> str:
    """The cause and its place, the first fix, the evidence; other fixes, the layers and the versions fold away."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield from _answer(report)
    yield from _fixes(report)
    facts = [*evidence_facts(report), *detail_facts(report), *next_facts(report)]
    if facts:
        yield ""
        yield from _facts(facts)
    if report.counterfactuals or report.fp32_sets:
        yield from _fold("what else was tried", _trials(report))
    if constants := list_small_constants(report.eps_audit):
        yield from _fold(
            "eps constants, and what the format made of them",
            _table(CONSTANT_HEADINGS, [line.cells for line in constants]),
        )
    table = make_table(report)
    if table is not None:
        yield from _fold(escape(table.title), _layers(table))
    yield from _fold("versions and notes", _notes(report))


def _answer(report: Report) -> Iterator[str]:
    answer = make_answer(report)
    parts = split_code(answer.headline)
    yield f"### {''.join(f'`{part}`' if is_code else escape(part) for part, is_code in parts)}"
    if answer.place or answer.where:
        places = [f"**{escape(answer.place)}**"] * bool(answer.place) + [escape(answer.where)] * bool(answer.where)
        yield from ("", ", ".join(places))
    if answer.code:
        yield ""
        yield from _fenced([line.whole for line in answer.code], "text")
    yield ""
    yield from _facts(answer.facts)


def _fixes(report: Report) -> Iterator[str]:
    fixes = list_fixes(report)
    open_fixes = [fix for fix in fixes if fix.verified][:_OPEN_FIXES]
    others = [fix for fix in fixes if fix not in open_fixes]
    for fix in open_fixes:
        yield from _fix(fix)
    if not open_fixes and (heading := no_fix_heading(report)):
        yield from ("", f"**{heading}**", "")
        yield from _facts(list(why_facts(report)))
    if others:
        yield from _fold(f"{plural(len(others), 'other change')} tried", (line for fix in others for line in _fix(fix)))


def escape(text: str) -> str:
    """The text as it is: no markup, no mention, no link to another issue."""
    return _SPECIAL.sub(r"\\\1", printable(text).translate(_LINKS))


def _facts(facts: Sequence[Fact]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for fact in facts:
        yield f"| {escape(fact.label)} | {_code(fact.text) if fact.is_command else escape(fact.text)} |"


def _code(command: str) -> str:
    """A command as code in a cell of a table, where a bar would end the cell; with backticks in it, as text."""
    return escape(command) if "`" in command or "|" in command else f"`{printable(command)}`"


def _fix(fix: ShownFix) -> Iterator[str]:
    yield from ("", f"**{escape(fix.title)}** ({escape(fix.result)})")
    if fix.patch:
        yield ""
        yield from _fenced(fix.patch, "diff" if fix.kind == "source" else "python")
    if fix.facts:
        yield ""
        yield from _facts(fix.facts)


def _fenced(lines: Sequence[str], language: str) -> Iterator[str]:
    """Lines in a fence that none of them can end."""
    fence = "`" * max([3, *(len(run) + 1 for line in lines for run in _FENCE.findall(line))])
    yield from (f"{fence}{language}", *lines, fence)


def _trials(report: Report) -> Iterator[str]:
    if kept := list(fp32_facts(report)):
        yield from (*_facts(kept), "")
    if report.counterfactuals:
        yield from _table(("with", f"the {varied_part(report)} is"), [line.cells for line in list_variations(report)])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield f"| {' | '.join(map(escape, row))} |"


def _fold(summary: str, lines: Iterator[str]) -> Iterator[str]:
    yield from ("", f"<details><summary>{summary}</summary>", "")
    yield from lines
    yield from ("", "</details>")


def _layers(table: LayerTable) -> Iterator[str]:
    rows = [
        (row.mark, row.layer, row.type, row.autocast, row.fp32, row.rel_err, bits_text(row.headroom_bits))
        for row in table.rows
    ]
    yield from _table(("", *table.headings), rows)
    if table.legend:
        yield from ("", escape(table.legend))


def _notes(report: Report) -> Iterator[str]:
    where = report.environment
    versions = (
        ("nandoctor", where.nandoctor),
        ("torch", where.torch),
        ("python", where.python),
        ("platform", where.platform),
        ("device", where.device),
        ("dump", report.dump.path),
    )
    yield from _facts([*(Fact(label=name, text=text) for name, text in versions), *note_facts(report)])
