"""The document of `nandoctor triage`: the groups, what fixes them, and what was not analysed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence

from nandoctor.evidence.codec import to_plain
from nandoctor.evidence.triage import CodePlace, DumpResult, Group, Triage
from nandoctor.text import file_line, join_first, plural, relative_path
from nandoctor.views.blocks import Block, Column, Fact, Facts, Headline, Level, Section, Table, Text
from nandoctor.views.evidence import MEANINGS
from nandoctor.views.save import MARK

_MAX_LISTED = 5
_CAUSE_WIDTH, _MIN_PLACE_WIDTH = 23, 18  # the first fits every cause's code
_OUTCOMES = {
    "unreadable": "unreadable",
    "failed": "not replayed",
    "out-of-memory": "out of memory",
    "died": "ended their worker",
    "timed-out": "timed out",
}


def triage_lines(triage: Triage) -> str:
    """Return lines of JSON: an object per dump, then one per group, then one for the whole; ASCII only."""
    whole = to_plain(triage)
    parts = [*whole.pop("dumps"), *whole.pop("groups"), {"kind": "triage", "tool": MARK, **whole}]
    return "".join(f"{json.dumps(part, allow_nan=False)}\n" for part in parts)


def triage_document(triage: Triage, level: Level = "screen") -> Iterator[Block]:
    """Yield the groups, and what could not be analysed; a page has a section for each group."""
    yield Headline(describe_triage(triage))
    if triage.groups:
        yield _table(triage.groups)
    if level == "page":
        reports = {result.path: result.report for result in triage.dumps}
        yield from (_group_section(place, group, reports) for place, group in enumerate(triage.groups, 1))
        if missing := _missing_facts(triage.dumps, limit=len(triage.dumps)):
            yield Section("Not analysed", [Facts(missing)])
        return
    fixes = [fact for place, group in enumerate(triage.groups, 1) for fact in _fix_facts(group, f"group {place}")]
    page = [Fact("page", os.path.join(triage.folder, "index.html"))]  # noqa: PTH118  (as the user wrote it)
    yield from map(Facts, (fixes, _missing_facts(triage.dumps, limit=_MAX_LISTED), page))


def describe_triage(triage: Triage) -> str:
    """Return the triage in one line: "412 dumps, 5 groups, 3 unreadable (2:41)"."""
    counts = [plural(len(triage.dumps), "dump"), plural(len(triage.groups), "group")]
    for outcome, name in _OUTCOMES.items():
        number = sum(result.outcome == outcome for result in triage.dumps)
        counts += [f"{number:,} {name}"] if number else []
    counts += [f"{triage.num_left:,} left"] if triage.num_left else []
    reused = f", {triage.num_reused:,} from an earlier run" if triage.num_reused else ""
    minutes, seconds = divmod(round(triage.elapsed_s), 60)
    return f"{', '.join(counts)} ({minutes}:{seconds:02}{reused})"


def _describe_place(place: CodePlace) -> str:
    """Return the place: "model/norm.py:45 ChannelNorm", or the module if no line is known."""
    if not place.file:
        return place.module or place.type or "-"
    return f"{relative_path(place.file)}:{place.line} {place.type}".strip()


def _describe_steps(group: Group) -> str:
    """Return the first and the last step: "12-9,120"."""
    if group.steps is None:
        return "-"
    first, last = group.steps
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _table(groups: Sequence[Group]) -> Table:
    """Return the columns that have content; in a narrow window the last ones are only on the page."""
    places = [group.place for group in groups]
    # A file's own name, "norm.py:45": a table has no room for the path.
    lines = [file_line(place.file, place.line) if place.file else _describe_place(place) for place in places]
    columns = (
        Column("dumps", [f"{len(group.paths):,}" for group in groups], right=True),
        Column("cause", [group.cause or group.verdict for group in groups], least=_CAUSE_WIDTH),
        Column("place", lines, least=_MIN_PLACE_WIDTH),
        Column("steps", [_describe_steps(group) for group in groups], right=True, spare=2),
        Column("runs", [f"{len(group.runs):,}" for group in groups], right=True, spare=3),
    )
    return Table(columns=[column for column in columns if any(cell not in ("-", "") for cell in column.cells)])


def _fix_facts(group: Group, label: str) -> Iterator[Fact]:
    """Yield what fixes a group and the command that shows it, or why nothing does; nothing if no fix was looked for."""
    if text := f"{group.fix} (verified on {group.representative})" if group.fix else group.fix_note:
        yield Fact(label, text)
    if group.command:
        yield Fact(label, group.command, is_command=True)


def _group_section(place: int, group: Group, reports: dict[str, str]) -> Section:
    """Return what is known of one group: its headline, where and when it occurred, and its dumps."""
    meaning = MEANINGS[group.verdict].format(kinds="non-finite", under="under autocast")
    known = {
        group.verdict: meaning,
        "cause": group.title,
        "line": group.place.text,
        "modules": ", ".join(module or "the model" for module in group.modules),
        "steps": _describe_steps(group),
        "runs": ", ".join(group.runs),
    }
    facts = [Fact(label, text) for label, text in known.items() if text not in ("", "-")]
    facts += _fix_facts(group, "fix")
    if group.page:
        facts.append(Fact("report", f"the report on {group.representative}", link=group.page))
    files = [Fact("dump", path, link=reports.get(path, "")) for path in group.paths]
    dumps = Section(plural(len(group.paths), "dump"), [Facts(files)], folded=True)
    title = f"Group {place}: {group.cause or group.verdict} at {_describe_place(group.place)}"
    return Section(title, [Text(group.headline), Facts(facts), dumps])


def _missing_facts(results: Iterable[DumpResult], *, limit: int) -> list[Fact]:
    """Return the reasons why most files were not analysed, each with one of the files."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome != "analysed":
            found.setdefault((_OUTCOMES[result.outcome], result.reason), []).append(result.path)
    rows = [(outcome, sorted(paths), reason) for (outcome, reason), paths in found.items()]
    rows.sort(key=lambda row: (-len(row[1]), row[1]))
    facts = [Fact(outcome, f"{join_first(paths, 1)}: {reason}") for outcome, paths, reason in rows[:limit]]
    left = sum(len(paths) for _, paths, _ in rows[limit:])
    return [*facts, *([Fact("", f"{left:,} more, with other reasons, on the page")] if left else [])]
