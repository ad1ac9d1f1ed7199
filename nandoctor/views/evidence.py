"""Put the evidence of a report into sentences: the verdict, how it was reproduced, where it began, how it spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nandoctor.causes.sentences import find_operand, place_of_operand
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import WRONG, Diagnosis, FirstNonfinite, Origin, Report, Reproduction, Verdict
from nandoctor.evidence.trace import Place, TensorStats
from nandoctor.text import (
    are,
    brief,
    excess,
    join_first,
    nonfinite_part,
    number,
    percent,
    plural,
    samples_text,
    shape_text,
    within,
)
from nandoctor.views.blocks import Fact, Tone
from nandoctor.views.inspect_dump import nonfinite_state_facts

_NAME_WIDTH = 64
_MESSAGE_WIDTH = 160
_MAX_LISTED = 3
_MAX_STOPS = 6

_CLOSE = 0.02
"""Share of the largest saved value: fp16 results differ by about this on hardware that sums in another order."""


def evidence_facts(report: Report) -> Iterator[Fact]:
    """Yield the evidence for the answer: cause, how it spread, fp32's value there, other faults."""
    if report.cause is not None:
        yield Fact("cause", f"{report.cause.code}: {report.cause.explanation}")
    if report.difference and report.origin is not None:
        samples = samples_text(report.origin.elements.samples or ())
        yield Fact("sample", f"{samples}: {report.difference}")
    first = report.first_nonfinite
    if first is not None:
        yield Fact("extent", describe_extent(first))
        if report.runs is not None and report.runs.fp32.finite and (reference := _describe_reference(first)):
            yield Fact("in fp32", reference)
    if len(report.chain) > 1:
        stops = [f"{link.op} in {short_place(link.place).in_words}" for link in report.chain]
        shown = stops if len(stops) <= _MAX_STOPS else [*stops[: _MAX_STOPS - 1], "...", stops[-1]]
        yield Fact("path", " -> ".join(shown))
    if report.bad_gradients:
        names = [short_name(stats.path) for stats in report.bad_gradients]
        yield Fact("gradients", f"non-finite: {join_first(names, _MAX_LISTED)}")
    if others := _describe_others(report.also):
        yield Fact("also", join_first(others, _MAX_LISTED))
    yield from nonfinite_state_facts(report.dump)
    both = () if report.runs is None else (report.runs.autocast, report.runs.fp32)
    ended = {run.dtype: " ".join(run.raised.split()) for run in both if run.raised}
    for dtype, raised in ended.items():
        yield Fact("raised", f"the {dtype} run stopped early: {brief(raised, _MESSAGE_WIDTH)}")


def note_facts(report: Report) -> list[Fact]:
    """Return the notes; those of the search only if it found a fix, since otherwise the section of fixes has them."""
    of_search = report.search_notes if any(fix.verified for fix in report.fixes) else ()
    return [Fact("note", note) for note in (*report.notes, *of_search)]


def describe_reproduction(reproduction: Reproduction) -> str:
    """Return how well the replay reproduces the saved output, and so how far the rest can be trusted."""
    output, num_bad = short_name(reproduction.output or "the output"), reproduction.num_bad_saved or 0
    if reproduction.grade == "no-reference":
        known = f"none of the outputs is known to be the saved {output}"
        return f"unchecked: {known if reproduction.output else 'there is no saved output to compare with'}"
    count = f"{num_bad:,}" if num_bad else "none"
    saved = f"{count} of {plural(reproduction.numel or 0, 'value')} of {output} {are(num_bad)} non-finite"
    if reproduction.grade in ("exact", "same-mask"):
        error = 0.0 if reproduction.grade == "exact" else reproduction.max_rel_err
        how = "reproduces your run" + (" in part" if (error or 0.0) > _CLOSE else "")
        how = "gives other values than your run" if (error or 0.0) > WRONG else how
        same = f"the same {saved}, all others" if num_bad else f"{output} is finite in both, and"
        if error is None:
            return f"reproduces your run: the same {saved}, no others to compare"
        others = f"{within(error)} of the largest saved value" if error else "identical"
        return f"{how}: {same} {others}"
    in_replay = f"{reproduction.num_bad_replayed:,}" if reproduction.num_bad_replayed else "none"
    return f"does not reproduce your run: {saved} in the file, {in_replay} in the replay"


def _describe_others(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the other faults, with the places of each cause together."""
    places: dict[str, list[str]] = {}
    for diagnosis in diagnoses:
        code = diagnosis.cause.code if diagnosis.cause else "unexplained"
        op = f"{diagnosis.origin.op} in " if diagnosis.origin.op else ""
        place = f"{op}{short_place(diagnosis.origin.place).in_words}"
        if place not in places.setdefault(code, []):
            places[code].append(place)
    return [f"{code} ({join_first(found, _MAX_LISTED)})" for code, found in places.items()]


def describe_extent(first: FirstNonfinite) -> str:
    """Return how many non-finite elements of which kind there are, in which samples, and where the first one is."""
    found = first.elements
    extent = nonfinite_part(found.kinds, found.num_bad, found.numel) if found.kinds else "not counted"
    if found.samples and len(first.value.shape) > 1:
        extent += f", {samples_text(found.samples, first.value.shape[0])}"
    where = f", first at {shape_text(found.first_index)}" if found.first_index else ""
    return f"{extent} ({describe_shape(first.value)}{where})"


def _describe_reference(first: FirstNonfinite) -> str | None:
    """Return fp32's values in the first non-finite tensor, compared with what its format can hold, or None."""
    if first.would_be is None:
        return None
    low, finite = first.value.dtype, f"finite, up to {number(first.would_be)}"
    if low == FP32:
        return finite
    if low.holds(first.would_be):
        return f"{finite}, which {low} can hold ({number(low.max)})"
    value = number(first.would_be, unlike=low.max)
    return f"computes {value} here: {excess(first.would_be, low.max)} what {low} can hold ({number(low.max)})"


def describe_shape(stats: TensorStats) -> str:
    """Return format and shape: "fp16 [8, 12, 32]"."""
    return f"{stats.dtype} {shape_text(stats.shape)}"


def short_name(name: str) -> str:
    """Return a name from a model or a file, short enough for a sentence."""
    return brief(name, _NAME_WIDTH)


def short_place(place: Place) -> Place:
    """Return a module call with names short enough for a sentence."""
    return replace(place, module=short_name(place.module), type=short_name(place.type))


def list_operands(origin: Origin) -> list[Fact]:
    """Return an op's tensors, the result last; labels are the code's text or the position.

    If a saved array is to blame, return only that array.
    """
    if origin.op is None:
        return [] if origin.output is None else [Fact(origin.output.path or "as saved", describe_tensor(origin.output))]
    op, alone, backward = origin.op, len(origin.inputs) == 1, origin.phase == "backward"
    expression = origin.source.expression if origin.source is not None and not backward else ""
    operands = []
    for stats in origin.inputs:
        text = find_operand(expression, op, stats.path, alone=False)
        name = text or place_of_operand(op, stats.path, alone=alone) or "incoming gradient"
        operands.append(Fact(name, describe_tensor(stats)))
    operands = [*dict.fromkeys(operands)]  # x * x reads one tensor
    if origin.output is not None:
        operands.append(Fact("outgoing gradient" if backward else "result", describe_tensor(origin.output)))
    return operands


def describe_tensor(stats: TensorStats) -> str:
    """Return format, shape, range of the finite values, and the non-finite and zero elements."""
    parts = [describe_shape(stats)]
    if stats.min is not None and stats.max is not None:
        median = f", median magnitude {number(stats.median)}" if stats.median is not None else ""
        parts.append(f"{number(stats.min)} to {number(stats.max)}{median}")
    elif stats.counts is not None:
        parts.append("no finite value")
    if stats.counts is not None and stats.counts.num_bad:
        parts.append(nonfinite_part(stats.counts.kinds, stats.counts.num_bad, stats.numel))
    elif not stats.finite:
        parts.append("not all finite")
    if stats.counts is not None and stats.counts.num_zero:
        parts.append(f"{percent(stats.counts.num_zero / stats.numel)} zeros")
    return ", ".join(parts)


MEANINGS: Mapping[Verdict, str] = {
    "precision": "{kinds} {under} only; fp32 is finite",
    "numerics": "{kinds} in fp32 as well: half precision is not to blame",
    "state": "the weights or buffers in the file are to blame",
    "input": "the batch in the file is non-finite before any layer reads it",
    "loss-scale": "every gradient is finite at loss scale 1; a GradScaler skips such a step",
    "silent": "finite {under}, and far from what fp32 computes",
    "healthy": "nothing that was checked failed {under} or in fp32",
    "not-reproduced": "the saved failure was not reproduced",
    "cannot-tell": "no certain failure in what could be checked",
    "fixed": "the step failed, and passes with the current code",
}
"""A verdict as people read it, with fields for what is non-finite, `kinds`, and in which run, `under`."""


def tone_of(verdict: Verdict) -> Tone:
    """Return how good the news is."""
    if verdict in ("healthy", "fixed"):
        return "good"
    return "unclear" if verdict in ("loss-scale", "not-reproduced", "cannot-tell") else "failed"
