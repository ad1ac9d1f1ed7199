"""Render `nandoctor triage`, as text and as a page: the groups as a table, and what could not be analysed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from nandoctor.evidence.codec import to_plain
from nandoctor.evidence.triage import CodePlace, DumpResult, Group, Triage
from nandoctor.renderers.console import Column, FittedTable, labelled, literal, print_parts, spaced
from nandoctor.renderers.save import MARK
from nandoctor.renderers.templating import render
from nandoctor.renderers.verdicts import VERDICTS
from nandoctor.text import brief, file_line, join_first, join_words, plural, printable, relative_path

_MAX_LISTED = 5
_MAX_NAMED = 3
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


def print_triage(triage: Triage, console: Console) -> None:
    """Print the groups, their fixes, what could not be analysed, and where the page is."""
    facts, missing = list(_group_facts(triage)), list(_missing_facts(triage.dumps))
    sections = spaced(
        [literal(describe_triage(triage), "bold")],
        [_table(triage.groups)] if triage.groups else [],
        [labelled(facts)] if facts else [],
        [labelled(missing)] if missing else [],
        [labelled([("page", os.path.join(triage.folder, "index.html"))])],  # noqa: PTH118  (as the user wrote it)
    )
    print_parts(sections, console)


def describe_triage(triage: Triage) -> str:
    """Return the triage in one line: "412 dumps, 5 groups, 3 unreadable (2:41, 8 workers)"."""
    counts = [plural(len(triage.dumps), "dump"), plural(len(triage.groups), "group")]
    for outcome, name in _OUTCOMES.items():
        number = sum(result.outcome == outcome for result in triage.dumps)
        counts += [f"{number:,} {name}"] if number else []
    counts += [f"{triage.num_left:,} left"] if triage.num_left else []
    reused = f", {triage.num_reused:,} from an earlier run" if triage.num_reused else ""
    workers = f", {plural(triage.num_workers, 'worker')}" if triage.num_workers else ""
    minutes, seconds = divmod(round(triage.elapsed_s), 60)
    return f"{', '.join(counts)} ({minutes}:{seconds:02}{workers}{reused})"


def describe_place(place: CodePlace) -> str:
    """Return the place: "model/norm.py:45 ChannelNorm", or the module if no line is known."""
    if not place.file:
        return place.module or place.type or "-"
    return printable(f"{relative_path(place.file)}:{place.line} {place.type}".strip())


def describe_steps(group: Group) -> str:
    """Return the first and the last step: "12-9,120"."""
    if group.steps is None:
        return "-"
    first, last = group.steps
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def fold_reasons(results: Iterable[DumpResult]) -> list[tuple[str, str, list[str]]]:
    """Return the files that were not analysed as rows of (outcome, reason, paths), the most frequent first."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome != "analysed":
            reason = result.reason
            for path in (result.path, str(Path(result.path).absolute())):  # one row may stand for many dumps
                reason = reason.removeprefix(f"{path}: ")
            rows.setdefault((_OUTCOMES[result.outcome], reason), []).append(result.path)
    listed = [(outcome, reason, sorted(paths)) for (outcome, reason), paths in rows.items()]
    return sorted(listed, key=lambda row: (-len(row[2]), row[2]))


def _table(groups: Sequence[Group]) -> FittedTable:
    """Return the columns that have content; in a narrow window the last ones are only on the page."""
    places = [group.place for group in groups]
    columns = (
        Column("dumps", [f"{len(group.paths):,}" for group in groups], right=True),
        Column("cause", [group.cause or group.verdict for group in groups], least=_CAUSE_WIDTH),
        Column(
            "place",
            [describe_place(place) for place in places],
            short=("place", [file_line(it.file, it.line) if it.file else describe_place(it) for it in places]),
            least=_MIN_PLACE_WIDTH,
        ),
        Column("steps", [describe_steps(group) for group in groups], right=True, spare=1),
        Column("ranks", [_listed(group.ranks) for group in groups], spare=2),
        Column("folds", [_listed(group.folds) for group in groups], spare=3),
        Column("runs", [f"{len(group.runs):,}" for group in groups], right=True, spare=4),
    )
    return FittedTable([column for column in columns if any(cell not in ("-", "") for cell in column.cells)])


def _listed(values: Sequence[object]) -> str:
    """Return a few values, or the first and the last of consecutive numbers: "0-7"."""
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return brief(join_first([str(value) for value in values], _MAX_NAMED), 20) if values else "-"


def _group_facts(triage: Triage) -> Iterator[tuple[str, str]]:
    """Yield what fixes each group."""
    for number, group in enumerate(triage.groups, 1):
        verified = [fix for fix in group.fixes if fix.verified]
        if verified:
            yield f"group {number}", f"{verified[0].title} (verified on {group.representative})"
        elif group.fixes:
            yield f"group {number}", f"no change tried on {group.representative} was verified"
        elif group.fix_note:
            yield f"group {number}", group.fix_note


def _missing_facts(results: Sequence[DumpResult]) -> Iterator[tuple[str, str]]:
    rows = fold_reasons(results)
    for outcome, reason, paths in rows[:_MAX_LISTED]:
        many = join_words([paths[0], f"{len(paths) - 1:,} more"])
        yield outcome, f"{join_first(paths, 1) if len(paths) < 3 else many}: {reason}"
    if len(rows) > _MAX_LISTED:
        left = sum(len(paths) for _, _, paths in rows[_MAX_LISTED:])
        yield "", f"{left:,} more, with other reasons, on the page"


def triage_page(triage: Triage) -> str:
    """Return the page's HTML."""
    return render(
        "triage.html.j2",
        triage=triage,
        headline=describe_triage(triage),
        results={result.path: result for result in triage.dumps},
        missing=fold_reasons(triage.dumps),
        verdicts=VERDICTS,
        place_of=describe_place,
        steps_of=describe_steps,
    )
