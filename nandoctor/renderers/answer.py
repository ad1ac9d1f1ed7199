"""The answer of a report: the cause in one sentence, its place in the source, the verdict, the replay; or one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.cells import cell_len, set_cell_size

from nandoctor.evidence.exhibits import Excerpt
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import Origin, Report
from nandoctor.evidence.trace import LOSS, describe_run
from nandoctor.evidence.verdicts import NOTHING_FOUND
from nandoctor.renderers.facts import Fact, describe_fp32_error, describe_reproduction, short_name, short_place
from nandoctor.renderers.verdicts import VERDICTS
from nandoctor.source_files import PACKAGE_FOLDERS
from nandoctor.text import kinds_text, nonfinite_part, ordinal, printable, samples_text

_MOST_CARETS = 4
"""An expression over more lines than this gets no carets; only its lines are marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcerptLine:
    """A numbered line of source, or the carets below one with a remark beside them. The text is printable."""

    text: str
    kind: Literal["context", "marked", "caret"]
    remark: str = ""

    @property
    def whole(self) -> str:
        """The line as plain text."""
        return f"{self.text} {self.remark}" if self.remark else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The part of a report to read first. `place` is "path:line" and `link` its URI, "" if no line is to blame.

    `where` names the function, the module, the call and the samples.
    """

    headline: str
    place: str
    link: str
    where: str
    code: tuple[ExcerptLine, ...]
    facts: tuple[Fact, ...]


def make_answer(report: Report, *, context: int = 3, width: int | None = None) -> Answer:
    """Return the answer with `context` lines of source around the expression, cut to `width` columns."""
    excerpt = report.excerpt
    place, link = "", ""
    if excerpt is not None:
        place = printable(f"{_in_package(excerpt.path)}:{excerpt.line}")
        path = Path(excerpt.file)
        link = path.as_uri() if path.is_absolute() else ""
    facts = [Fact(report.verdict, describe_verdict(report))]
    if report.verdict != "interrupted" or report.reproduction.grade != "no-reference":
        facts.append(Fact("replay", describe_reproduction(report.reproduction)))
    return Answer(
        headline=printable(report.headline),
        place=place,
        link=link,
        where=printable(_describe_where(report)),
        code=() if excerpt is None else tuple(_code_lines(excerpt, _remark(report), context, width)),
        facts=tuple(facts),
    )


def _in_package(path: str) -> str:
    """Return the path from an installed package on, since the whole does not fit into a line; other paths as is."""
    names = path.replace("\\", "/").split("/")
    places = [index for index, name in enumerate(names) if name in PACKAGE_FOLDERS]
    return "/".join(names[places[-1] + 1 :]) if places else path


def describe_verdict(report: Report) -> str:
    """Return the verdict's meaning, with the formats of this replay."""
    run = report.runs.autocast if report.runs is not None else None
    under = "in the replay" if run is None or run.dtype == FP32 else describe_run(run.policy, run.dtype)
    kinds = kinds_text(report.origin.elements.kinds) if report.origin is not None else ""
    if report.verdict == "numerics" and _overflows_low_format(report):
        return f"{kinds} here {under} only; fp32 is non-finite as well, at another place"
    meaning = VERDICTS[report.verdict].meaning.format(under=under, kinds=kinds or "non-finite")
    return f"{meaning}; {describe_fp32_error(report.fp32_error)}" if report.fp32_error is not None else meaning


def _overflows_low_format(report: Report) -> bool:
    """Return True if the cause overflows a format narrower than fp32, although fp32 fails as well."""
    if report.origin is None or report.cause is None:
        return False
    made, exact = report.origin.output, report.origin.would_be
    if report.cause.code == "gradient-overflow" or made is None or exact is None:
        return report.cause.code == "gradient-overflow"
    casts = (read.absmax or 0.0 for read in report.origin.inputs)  # an input's cast may be what overflows
    largest = max((abs(exact), *casts))
    return report.cause.code.endswith("-overflow") and abs(exact) <= FP32.max and made.dtype.max < largest <= FP32.max


def _describe_where(report: Report) -> str:
    """Return function, module, call and samples: "ChannelNorm.forward (2nd call of norm, sample 2)"."""
    origin = report.origin
    if origin is None:
        return ""
    function = report.excerpt.function if report.excerpt is not None else ""
    samples, count = origin.elements.samples, origin.output.shape[0] if origin.output and origin.output.shape else None
    notes = (_describe_module(origin) if function else "", samples_text(samples, count) if samples else "")
    details = ", ".join(filter(None, notes))
    owner = function or ("the batch" if origin.phase == "input" else short_place(origin.place).with_type)
    return f"{owner} ({details})" if details else owner


def _describe_module(origin: Origin) -> str:
    place = origin.place
    name = "the loss" if place.module == LOSS else short_name(place.module)
    if not place.call:
        return name
    return f"{ordinal(place.call + 1)} call of {name or 'the model'}"


def _remark(report: Report) -> str:
    """Return the text beside the caret: the cause's own remark, else how many values are non-finite."""
    if report.cause is not None and report.cause.source is not None:
        return report.cause.remark
    if report.origin is None or not report.origin.elements.kinds:
        return ""
    found = report.origin.elements
    return nonfinite_part(found.kinds, found.num_bad, found.numel, "value")


def _code_lines(excerpt: Excerpt, remark: str, context: int, width: int | None) -> Iterator[ExcerptLine]:
    """Yield numbered lines, with ">" before those of the expression and carets below it."""
    last = excerpt.first + len(excerpt.lines) - 1
    shown = range(max(excerpt.first, excerpt.line - context), min(last, excerpt.end_line + context) + 1)
    texts = {number: printable(excerpt.lines[number - excerpt.first]) for number in shown}
    dent = min((len(text) - len(text.lstrip()) for text in texts.values() if text), default=0)
    gutter = len(str(shown.stop - 1))
    room = sys.maxsize if width is None else max(width - gutter - len("> ") - len(" | "), 20)
    hidden = _hidden(excerpt, dent, room)
    start = dent + hidden
    for number, text in texts.items():
        inside = excerpt.line <= number <= excerpt.end_line
        seen = f"{'…' if hidden else text[start : start + 1]}{text[start + 1 :]}" if text[dent:] else ""
        if text or inside:
            cut = seen if cell_len(seen) <= room else f"{set_cell_size(seen, room - 1)}…"
            line = f"{'>' if inside else ' '} {number:>{gutter}} | {cut}"
            yield ExcerptLine(text=line.rstrip(), kind="marked" if inside else "context")
        if inside and (caret := _carets(excerpt, number, text, start, seen)):
            note, blank = printable(remark) if number == excerpt.end_line else "", f"  {'':>{gutter}} |"
            fits = cell_len(f"{caret} {note}") <= room
            yield ExcerptLine(text=f"{blank} {caret[:room]}", kind="caret", remark=note if fits else "")
            if note and not fits:
                yield ExcerptLine(text=blank, kind="caret", remark=note)


def _hidden(excerpt: Excerpt, dent: int, room: int) -> int:
    """Return how many characters to cut at the left to show an expression far to the right; "…" replaces the next."""
    if excerpt.column is None or excerpt.end_column is None or excerpt.line != excerpt.end_line:
        return 0
    return max(0, min(excerpt.end_column - dent - room, excerpt.column - dent - 1))


def _carets(excerpt: Excerpt, number: int, text: str, start: int, seen: str) -> str:
    """Return the carets below one line of the expression, in terminal columns; "" if its columns are unknown."""
    if excerpt.column is None or excerpt.end_column is None or excerpt.end_line - excerpt.line >= _MOST_CARETS:
        return ""
    begin = excerpt.column if number == excerpt.line else len(text) - len(text.lstrip())
    end = excerpt.end_column if number == excerpt.end_line else len(text)
    if not start <= begin < end:
        return ""
    return " " * cell_len(seen[: begin - start]) + "^" * max(cell_len(text[begin:end]), 1)


def one_line(report: Report) -> str:
    """Return the dump, the verdict and the headline, for `--quiet` and for scripts that read many."""
    return printable(f"{report.dump.path}: {report.verdict}: {report.headline}")


def concise_line(report: Report) -> str:
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


LINES: Mapping[str, Callable[[Report], str]] = {"quiet": one_line, "concise": concise_line, "github": github_line}
"""The one-line formats, by their names on the command line."""
