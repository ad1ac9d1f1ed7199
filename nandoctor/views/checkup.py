"""The document of `nandoctor checkup`: the layers nearest to the limits of the formats, and where a run is heading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.diagnosis.ranges import by_headroom
from nandoctor.evidence.checkup import CHECKED_FORMATS, CheckedStep, Checkup, Crossing, LayerRange
from nandoctor.evidence.formats import FP16, FloatFormat
from nandoctor.text import bits_text, number, percent, plural
from nandoctor.views.blocks import Block, Cell, Column, Fact, Facts, Headline, Level, Section, Table, Tone
from nandoctor.views.layer_table import common_path

_MAX_CROSSINGS = 5
_MIN_NAME_WIDTH = 16
_TONES: dict[str, Tone] = {"fits": "", "near": "unclear", "overflows": "failed"}
RANGE_ONLY = (
    "Only the range is judged, not the rounding error. Shares are estimated from at most 1,024 elements of a tensor; "
    "a softmax may flush small values to 0 without changing its result."
)


def checkup_document(checkup: Checkup, level: Level) -> Iterator[Block]:
    """Yield the layers with the least headroom in the last checkpoint, then where the run is heading.

    A page has every checkpoint.
    """
    last, *earlier = reversed(checkup.steps)
    yield Headline(describe_step(last))
    yield _step_section(last)
    if earlier:
        yield Section("How the values grow", [Facts(list(_trend_facts(checkup)))])
    if level == "page":
        yield from map(_step_section, earlier)
    yield Section("", [Facts([Fact("note", text) for text in (*checkup.notes, RANGE_ONLY)])])


def describe_step(checked: CheckedStep) -> str:
    """Return the step in one sentence: which layer comes nearest to fp16's limit."""
    order = by_headroom(checked.layers)
    if not order:
        return f"{checked.path}: nothing in it runs in low precision"
    first, fits = order[0], [layer.fit_in(FP16) for layer in order]
    largest = number(first.absmax)
    if num_over := sum(fit.fit == "overflows" for fit in fits):
        return f"{plural(num_over, 'module')} cannot run in fp16: {_name(first)} reaches {largest}"
    bits = fits[0].headroom_bits
    nearest = f"{_name(first)} comes nearest: it reaches {largest}, {bits:.1f} doublings below the limit"
    if not checked.run_finite:
        return f"The step is non-finite {checked.run}, though fp16 holds every value that fp32 has: {nearest}"
    return f"fp16 holds every value; {nearest}"


def _step_section(checked: CheckedStep) -> Section:
    title = f"Step {checked.step:,}" if checked.step is not None else checked.path
    return Section(title, [Facts(list_facts(checked)), _table(by_headroom(checked.layers))], name=title)


def list_facts(checked: CheckedStep) -> list[Fact]:
    """Return how many modules each format can hold."""
    facts = [Fact("file", checked.path if checked.step is None else f"{checked.path} (step {checked.step:,})")]
    for format in CHECKED_FORMATS:  # noqa: A001
        fits = [layer.fit_in(format).fit for layer in checked.layers]
        overflow, near = fits.count("overflows"), fits.count("near")
        worst = [f"{overflow:,} cannot run in it"] * bool(overflow)
        worst += [f"{near:,} with less than one doubling left"] * bool(near)
        facts.append(Fact(format.label, f"of {plural(len(fits), 'module')}, {', '.join(worst) or 'none overflows'}"))
    if not checked.run_finite:
        facts.append(Fact("replay", f"the step is already non-finite {checked.run}: nandoctor replay {checked.path}"))
    return facts


def _trend_facts(checkup: Checkup) -> Iterator[Fact]:
    steps = sorted({checked.step for checked in checkup.steps if checked.step is not None})
    if len(steps) < 2:
        yield Fact("trend", "unknown: the files do not contain two different steps")
        return
    if not checkup.crossings:
        yield Fact("trend", f"no module grows from step {steps[0]:,} to {steps[-1]:,}")
        return
    yield from (Fact("trend", describe_crossing(crossing)) for crossing in checkup.crossings[:_MAX_CROSSINGS])
    if len(checkup.crossings) > _MAX_CROSSINGS:
        yield Fact("trend", f"{len(checkup.crossings) - _MAX_CROSSINGS} more grow (--json)")
    yield Fact("trend", "extrapolated by a least-squares line of log2(largest magnitude) over the step")


def describe_crossing(crossing: Crossing) -> str:
    """Return a sentence on how the largest value of a module grows."""
    growth = f"{crossing.module or 'the model'} grows by {number(crossing.doublings)} doublings in 1,000 steps"
    fit = f"{plural(crossing.num_points, 'checkpoint')}"
    if crossing.num_points > 2:  # a line always goes through two
        fit += f", off by at most {number(round(crossing.residual_bits, 3))} doublings"
    if crossing.step is None:
        return f"{growth}, and does not overflow fp16 within ten times the steps between these files ({fit})"
    return f"{growth}, and overflows fp16 at step {round(crossing.step):,} ({fit})"


def _table(layers: Sequence[LayerRange]) -> Table:
    """Return the doublings left in each format; in a narrow window the last columns are left out."""
    common = common_path(layer.module for layer in layers)
    names = [_name(layer) for layer in layers]
    short = (f"in {common[:-1]}", [name.removeprefix(common) for name in names]) if common else None
    columns = [
        Column("module", names, short=short, least=_MIN_NAME_WIDTH),
        Column("largest", [number(layer.absmax) for layer in layers], right=True),
        *(
            Column(shown.label, [_headroom(layer, shown) for layer in layers], right=True, spare=place)
            for place, shown in enumerate(CHECKED_FORMATS)
        ),
        Column("to 0 in fp16", [_flushed(layer) for layer in layers], right=True, spare=9),
        Column("class", [layer.type for layer in layers], spare=12),
        Column("largest at", [layer.largest_at for layer in layers], spare=13),
    ]
    return Table(title="Doublings left before each format overflows, the nearest first", columns=columns)


def _headroom(layer: LayerRange, shown: FloatFormat) -> Cell:
    fit = layer.fit_in(shown)
    return Cell(bits_text(fit.headroom_bits), tone=_TONES[fit.fit])


def _flushed(layer: LayerRange) -> str:
    share = layer.fit_in(FP16).flushed_share
    return percent(share) if share else "-"


def _name(layer: LayerRange) -> str:
    return layer.module or f"({layer.type})"
