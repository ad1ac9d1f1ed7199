"""Puts the results of many dumps into groups: one cause at one place in the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nandoctor.evidence.triage import DumpResult, Finding, Group, RecurringSample, SampleId, TrainingMoment
from nandoctor.evidence.verdicts import NOTHING_FOUND

_MAX_RECURRING = 3
_MIN_DUMPS = 3
# How well a dump stands for its group: the replay that agrees best with what was saved.
_GRADES = ("exact", "same-mask", "no-reference", "elsewhere", "finite")

_Key = tuple[object, ...]


def group_results(results: Iterable[DumpResult]) -> tuple[Group, ...]:
    """Group what was analysed; failures first, then by size."""
    members: dict[_Key, list[DumpResult]] = {}
    for result in results:
        if result.finding is not None:
            members.setdefault(_key(result.finding), []).append(result)
    groups = [_make_group(sorted(found, key=_in_training_order)) for found in members.values()]
    return tuple(sorted(groups, key=_rank))


def find_recurring(results: Sequence[DumpResult]) -> tuple[RecurringSample, ...]:
    """The samples that at least half of the dumps fail in.

    None where more than three do: then the batches hold the same samples anyway, and none stands out.
    """
    known = [result.finding.samples for result in results if result.finding is not None and result.finding.samples]
    if len(known) < _MIN_DUMPS:
        return ()
    counts: Counter[SampleId] = Counter(sample for samples in known for sample in set(samples))
    frequent = sorted((count, sample.text, sample) for sample, count in counts.items() if 2 * count >= len(known))
    if len(frequent) > _MAX_RECURRING:
        return ()
    return tuple(
        RecurringSample(sample=sample, num_dumps=count, num_known=len(known)) for count, _, sample in reversed(frequent)
    )


def failed(results: Iterable[DumpResult]) -> list[DumpResult]:
    """The dumps in which the replay found something non-finite."""
    return [result for result in results if result.finding is not None and result.finding.verdict not in NOTHING_FOUND]


def _key(finding: Finding) -> _Key:
    """A line says where; without one the module does, and its class where that is repeated (blocks.0, blocks.1)."""
    place = finding.place
    if finding.verdict in NOTHING_FOUND:
        return (finding.verdict,)
    where = (place.file, place.line) if place.file else (place.type, _without_numbers(place.module))
    return finding.verdict, finding.cause, *where


def _without_numbers(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _make_group(results: Sequence[DumpResult]) -> Group:
    findings = [result.finding for result in results if result.finding is not None]
    moments = [result.when for result in results if result.when is not None]
    best = min(results, key=_fitness)
    assert best.finding is not None
    steps = [moment.step for moment in moments if moment.step is not None]
    written = sorted(moment.written for moment in moments if moment.written is not None)
    return Group(
        verdict=best.finding.verdict,
        cause=best.finding.cause,
        title=best.finding.title,
        headline=best.finding.headline,
        place=best.finding.place,
        paths=tuple(result.path for result in results),
        modules=tuple(dict.fromkeys(finding.place.module for finding in findings)),
        steps=(min(steps), max(steps)) if steps else None,
        ranks=tuple(sorted({moment.rank for moment in moments if moment.rank is not None})),
        folds=tuple(sorted({moment.fold for moment in moments if moment.fold is not None})),
        runs=tuple(sorted({moment.run for moment in moments})),
        written=(written[0], written[-1]) if written else None,
        recurring=find_recurring(results),
        representative=best.path,
    )


def _fitness(result: DumpResult) -> int:
    """The lower the better, and the same wherever and however often the dumps are replayed."""
    assert result.finding is not None
    return _GRADES.index(result.finding.grade)


def _in_training_order(result: DumpResult) -> tuple[str, int, str]:
    when = result.when or TrainingMoment(run="")
    return when.run, when.step if when.step is not None else -1, result.path


def _rank(group: Group) -> tuple[bool, int, str, str]:
    place = group.place
    return group.verdict in NOTHING_FOUND, -len(group.paths), group.cause or "", f"{place.file}:{place.line:09}"
