"""Compares two reports: before and after a fix, epoch 3 and epoch 9, fp16 and bf16."""

from __future__ import annotations

import math
from pathlib import PurePath

from nandoctor.evidence.report import LayerRow, Report
from nandoctor.evidence.report_diff import ChangedFact, Comparison, ComparisonOutcome, LayerChange
from nandoctor.evidence.verdicts import NOTHING_FOUND

LARGE_CHANGE_BITS = 0.5

_HEADLINES: dict[ComparisonOutcome, str] = {
    "fixed": "The failure is gone",
    "broken": "It did not fail before, but it does now",
    "moved": "It still fails, but in another way",
    "same-failure": "The same failure in both",
    "both-finite": "Nothing is non-finite in either",
}


def compare_reports(before: Report, after: Report) -> Comparison:
    """Return the facts and layers that differ; calls are matched by module and call number."""
    ours, theirs = _rows(before), _rows(after)
    shared = [key for key in ours if key in theirs]
    layers = [_compare_layers(ours[key], theirs[key]) for key in shared]
    outcome = _find_outcome(before, after)
    was, now = _list_facts(before), _list_facts(after)
    return Comparison(
        before=before.dump.path,
        after=after.dump.path,
        outcome=outcome,
        headline=_write_headline(outcome, before, after),
        changes=tuple(
            ChangedFact(name=name, before=was[name], after=now[name]) for name in was if was[name] != now[name]
        ),
        layers=tuple(sorted(filter(_is_large, layers), key=_importance)),
        num_shared=len(shared),
    )


def _rows(report: Report) -> dict[tuple[str, int], LayerRow]:
    return {row.place.key: row for row in report.runs.autocast.modules} if report.runs else {}


def _find_outcome(before: Report, after: Report) -> ComparisonOutcome:
    was_sound, is_sound = before.verdict in NOTHING_FOUND, after.verdict in NOTHING_FOUND
    if was_sound or is_sound:
        return "both-finite" if was_sound and is_sound else "broken" if was_sound else "fixed"
    return "same-failure" if _failure(before) == _failure(after) else "moved"


def _failure(report: Report) -> tuple[str | None, ...]:
    """Return verdict, cause and place, which are equal for two reports of the same failure."""
    return (report.verdict, _cause(report), _place(report))


def _cause(report: Report) -> str | None:
    return report.cause.code if report.cause else None


def _place(report: Report) -> str | None:
    """Return the op and module of the origin, else the module where a non-finite value first showed."""
    if report.origin is not None:
        op = f"{report.origin.op} in " if report.origin.op else ""
        return f"{op}{report.origin.place.in_words}"
    return report.first_nonfinite.place.label if report.first_nonfinite else None


def _write_headline(outcome: ComparisonOutcome, before: Report, after: Report) -> str:
    cause = _cause(before if outcome in ("fixed", "both-finite") else after)
    return f"{_HEADLINES[outcome]}{f': {cause}' if cause else ''}."


def _list_facts(report: Report) -> dict[str, str | None]:
    first, origin = report.first_nonfinite, report.origin
    run = report.runs.autocast if report.runs else None
    return {
        "verdict": report.verdict,
        "cause": _cause(report),
        "origin": _place(report),
        "line": f"{PurePath(origin.source.file).name}:{origin.source.line}" if origin and origin.source else None,
        "first non-finite": first.place.in_words if first else None,
        "samples": ", ".join(map(str, first.elements.samples)) if first and first.elements.samples else None,
        "non-finite gradients": str(len(report.bad_gradients)),
        "replay": report.reproduction.grade,
        "format": str(run.dtype) if run else None,
        "mode": ("train" if run.training else "eval") if run else None,
        "torch": report.environment.torch,
    }


def _compare_layers(before: LayerRow, after: LayerRow) -> LayerChange:
    return LayerChange(
        place=after.place,
        finite_before=before.finite,
        finite_after=after.finite,
        absmax_before=before.absmax,
        absmax_after=after.absmax,
        growth=after.absmax / before.absmax if before.absmax and after.absmax else None,
    )


def _bits(change: LayerChange) -> float:
    """Return by how many powers of two the largest magnitude changed, up or down."""
    return abs(math.log2(change.growth)) if change.growth is not None else 0.0


def _is_large(change: LayerChange) -> bool:
    return _bits(change) >= LARGE_CHANGE_BITS or change.finite_before != change.finite_after


def _importance(change: LayerChange) -> tuple[bool, float]:
    """Return a sort key: layers that became finite or non-finite, then the largest changes, else order of execution.

    Changes are rounded to a tenth of a bit: the last digits depend on the processor, and would shuffle equal layers.
    """
    return change.finite_before == change.finite_after, -round(_bits(change), 1)
