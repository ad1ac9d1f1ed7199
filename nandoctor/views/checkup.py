"""The document of `nandoctor checkup`: the layers nearest to the limits of the formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.diagnosis.ranges import by_headroom
from nandoctor.evidence.checkup import CHECKED_FORMATS, Checkup, LayerRange
from nandoctor.evidence.formats import FP16, FloatFormat
from nandoctor.text import bits_text, number, percent, plural
from nandoctor.views.blocks import Block, Cell, Column, Fact, Facts, Headline, Section, Table, Tone
from nandoctor.views.layer_table import common_path

_MIN_NAME_WIDTH = 16
_TONES: dict[str, Tone] = {"fits": "", "near": "unclear", "overflows": "failed"}
RANGE_ONLY = (
    "Only the range is judged, not the rounding error. Shares are estimated from at most 1,024 elements of a tensor; "
    "a softmax may flush small values to 0 without changing its result."
)


def checkup_document(checkup: Checkup) -> Iterator[Block]:
    """Yield the layers, those with the least headroom first."""
    layers = _table(by_headroom(checkup.layers))
    yield Headline(describe_checkup(checkup))
    yield Section(checkup.path, [Facts(list_facts(checkup)), layers], name="Layers")
    yield Section("", [Facts([Fact("note", text) for text in (*checkup.notes, RANGE_ONLY)])])


def describe_checkup(checkup: Checkup) -> str:
    """Return the step in one sentence: which layer comes nearest to fp16's limit."""
    order = by_headroom(checkup.layers)
    if not order:
        return f"{checkup.path}: nothing in it runs in low precision"
    first, fits = order[0], [layer.fit_in(FP16) for layer in order]
    largest = number(first.absmax)
    if num_over := sum(fit.fit == "overflows" for fit in fits):
        return f"{plural(num_over, 'module')} cannot run in fp16: {_name(first)} reaches {largest}"
    bits = fits[0].headroom_bits
    nearest = f"{_name(first)} comes nearest: it reaches {largest}, {bits:.1f} doublings below the limit"
    if not checkup.run_finite:
        return f"The step is non-finite {checkup.run}, though fp16 holds every value that fp32 has: {nearest}"
    return f"fp16 holds every value; {nearest}"


def list_facts(checkup: Checkup) -> list[Fact]:
    """Return how many modules each format can hold."""
    facts = []
    for format in CHECKED_FORMATS:  # noqa: A001
        fits = [layer.fit_in(format).fit for layer in checkup.layers]
        overflow, near = fits.count("overflows"), fits.count("near")
        worst = [f"{overflow:,} cannot run in it"] * bool(overflow)
        worst += [f"{near:,} with less than one doubling left"] * bool(near)
        facts.append(Fact(format.label, f"of {plural(len(fits), 'module')}, {', '.join(worst) or 'none overflows'}"))
    if not checkup.run_finite:
        facts.append(Fact("replay", f"the step is already non-finite {checkup.run}: nandoctor replay {checkup.path}"))
    return facts


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
