"""The report as Markdown, fit for an issue.

In: a `Report`. Out: GitHub-flavoured Markdown in which names from a dump or a model are text and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nandoctor.evidence.report import Report
from nandoctor.renderers.atomic_write import MARK, write_text
from nandoctor.renderers.facts import Fact, list_facts
from nandoctor.renderers.fix_facts import ShownFix, describe_fp32_sets, list_constants, list_fixes, list_variations
from nandoctor.renderers.table import LayerTable, make_table
from nandoctor.renderers.verdicts import VERDICTS
from nandoctor.text import bits_text, plural, printable

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$])")
_LINKS = str.maketrans({"@": "&#64;", "#": "&#35;"})  # a backslash does not stop GitHub from calling somebody
_OPEN_FIXES = 2
_FENCE = re.compile(r"`{3,}")


def write_markdown(report: Report, path: Path) -> None:
    """Write the report. Raises NanDoctorError if the file cannot be written."""
    write_text(f"{report_markdown(report)}\n<!-- {MARK} -->\n", path)


def report_markdown(report: Report) -> str:
    """Verdict, facts, fixes with their patches; the layers and the versions fold away."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"### {report.verdict.upper()}: {VERDICTS[report.verdict].meaning}"
    yield from ("", f"**{escape(report.headline)}**", "")
    yield from _facts(list_facts(report))
    fixes = list_fixes(report)
    for fix in fixes[:_OPEN_FIXES]:
        yield from _fix(fix)
    if others := fixes[_OPEN_FIXES:]:
        yield from _fold(f"{plural(len(others), 'more fix', 'more fixes')} tried", _each(others))
    if report.counterfactuals or report.fp32_sets:
        yield from _fold("what else was tried", _trials(report))
    if constants := list_constants(report):
        headings = ("constant", "in", "line", "used by", "becomes")
        yield from _fold(
            "eps constants, and what the format made of them",
            _table(headings, [line.cells for line in constants]),
        )
    table = make_table(report)
    if table is not None:
        yield from _fold(escape(table.title), _layers(table))
    yield from _fold("versions and notes", _notes(report))


def escape(text: str) -> str:
    """The text as it is: no markup, no mention, no link to another issue."""
    return _SPECIAL.sub(r"\\\1", printable(text).translate(_LINKS))


def _facts(facts: Sequence[Fact]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for fact in facts:
        yield f"| {escape(fact.label)} | {escape(fact.text)} |"


def _fix(fix: ShownFix) -> Iterator[str]:
    yield from ("", f"**{escape(fix.title)}** ({'tried' if fix.verified else 'not a fix'}: {fix.outcome})", "")
    fence = "`" * max([3, *(len(run) + 1 for line in fix.patch for run in _FENCE.findall(line))])
    if fix.patch:
        yield from (f"{fence}diff" if fix.kind == "source" else f"{fence}python", *fix.patch, fence)


def _each(fixes: Sequence[ShownFix]) -> Iterator[str]:
    for fix in fixes:
        yield from _fix(fix)


def _trials(report: Report) -> Iterator[str]:
    if report.fp32_sets is not None and report.fp32_sets.sets:
        yield from (f"Enough to keep in fp32: {escape(describe_fp32_sets(report.fp32_sets))}.", "")
    if report.counterfactuals:
        yield from _table(("varied", "setting", "outcome"), [line.cells for line in list_variations(report)])


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
    yield f"| | {' | '.join(table.headings)} |"
    yield f"|---|{'---|' * len(table.headings)}"
    for row in table.rows:
        cells = (row.mark, row.layer, row.type, row.autocast, row.fp32, row.rel_err, bits_text(row.headroom_bits))
        yield f"| {' | '.join(map(escape, cells))} |"
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
    yield from _facts([*(Fact(label=name, text=text) for name, text in versions), *_remarks(report)])


def _remarks(report: Report) -> Iterator[Fact]:
    yield from (Fact(label="note", text=note) for note in report.notes)
