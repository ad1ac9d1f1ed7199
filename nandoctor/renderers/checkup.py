"""Render `nandoctor checkup`, as text and as a page: the layers nearest to the limits of the formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from nandoctor.diagnosis.ranges import by_headroom
from nandoctor.evidence.checkup import CHECKED_FORMATS, CheckedStep, Checkup, Crossing, LayerRange
from nandoctor.evidence.formats import FP16
from nandoctor.renderers.console import Column, FittedTable, labelled, literal, print_parts, spaced
from nandoctor.renderers.table import common_path
from nandoctor.renderers.templating import render
from nandoctor.text import bits_text, number, percent, plural

_MAX_LAYERS = 12
_MAX_CROSSINGS = 5
_MIN_NAME_WIDTH = 16
_STYLES = {"fits": "", "near": "yellow", "overflows": "red"}
RANGE_ONLY = (
    "Only the range is judged, not the rounding error. Shares are estimated from at most 1,024 elements of a tensor; "
    "a softmax may flush small values to 0 without changing its result."
)


def checkup_page(checkup: Checkup) -> str:
    """Return the checkup as one self-contained HTML page."""
    return render(
        "checkup.html.j2",
        checkup=checkup,
        formats=CHECKED_FORMATS,
        headline_of=describe_step,
        facts_of=list_facts,
        crossings=[describe_crossing(crossing) for crossing in checkup.crossings],
        order=lambda step: by_headroom(step.layers),
        name_of=_name,
        percent=percent,
        range_only=RANGE_ONLY,
    )


def print_checkup(checkup: Checkup, console: Console) -> None:
    """Print the layers with the least headroom in the last checkpoint, then where the run is heading."""
    last = checkup.steps[-1]
    sections = spaced(
        [literal(describe_step(last), "bold")],
        [labelled(list_facts(last))],
        [_table(by_headroom(last.layers)[:_MAX_LAYERS])],
        [labelled(_trend_facts(checkup))] if len(checkup.steps) > 1 else [],
        [labelled(("note", text) for text in (*checkup.notes, RANGE_ONLY))],
    )
    print_parts(sections, console)


def describe_step(checked: CheckedStep) -> str:
    """Return the step in one sentence: which layer comes nearest to fp16's limit."""
    order = by_headroom(checked.layers)
    if not order or order[0].values is None:
        return f"{checked.path}: nothing in it runs in low precision"
    first, values = order[0], order[0].values
    over = [layer for layer in order if layer.values is not None and layer.values.fit_in(FP16).fit == "overflows"]
    if over:
        return f"{plural(len(over), 'module')} cannot run in fp16: {_name(first)} reaches {number(values.absmax)}"
    bits = values.fit_in(FP16).headroom_bits
    nearest = f"{_name(first)} comes nearest: it reaches {number(values.absmax)}, {bits:.1f} doublings below the limit"
    if not checked.run_finite:
        return f"The step is non-finite {checked.run}, though fp16 holds every value that fp32 has: {nearest}"
    return f"fp16 holds every value; {nearest}"


def list_facts(checked: CheckedStep) -> list[tuple[str, str]]:
    """Return how many modules each format can hold, and the loss scales that the gradients allow, as (label, text)."""
    facts = [("file", checked.path if checked.step is None else f"{checked.path} (step {checked.step:,})")]
    for format in CHECKED_FORMATS:  # noqa: A001
        fits = [layer.values.fit_in(format).fit for layer in checked.layers if layer.values is not None]
        overflow, near = fits.count("overflows"), fits.count("near")
        worst = [f"{overflow:,} cannot run in it"] * bool(overflow)
        worst += [f"{near:,} with less than one doubling left"] * bool(near)
        facts.append((format.label, f"of {plural(len(fits), 'module')}, {', '.join(worst) or 'none overflows'}"))
    if not checked.run_finite:
        facts.append(("replay", f"the step is already non-finite {checked.run}: nandoctor replay {checked.path}"))
    facts.append(("gradients", _describe_scales(checked)))
    return facts


def _describe_scales(checked: CheckedStep) -> str:
    scales = checked.loss_scale
    if scales is None:
        return "not checked (pass --loss)"
    low, high = number(scales.smallest), number(scales.largest)
    least, most = scales.smallest_by or "the model", scales.largest_by or "the model"
    text = f"fit fp16 at loss scales from {low} ({least}) to {high} ({most})"
    if scales.smallest <= 1:
        text = f"fit fp16 at loss scales up to {high} ({most})"
    if scales.smallest > scales.largest:
        text = f"no loss scale suits fp16: {most} overflows above {high}, {least} loses 1 % or more below {low}"
    if scales.current is None:
        return text
    over = ", at which they overflow" if scales.current > scales.largest else ""
    return f"{text}; this step has {number(scales.current)}{over}"


def _trend_facts(checkup: Checkup) -> Iterator[tuple[str, str]]:
    steps = sorted({checked.step for checked in checkup.steps if checked.step is not None})
    if len(steps) < 2:
        yield "trend", "unknown: the files do not contain two different steps"
        return
    if not checkup.crossings:
        yield "trend", f"no module grows from step {steps[0]:,} to {steps[-1]:,}"
    for crossing in checkup.crossings[:_MAX_CROSSINGS]:
        yield "trend", describe_crossing(crossing)
    if len(checkup.crossings) > _MAX_CROSSINGS:
        yield "", f"{len(checkup.crossings) - _MAX_CROSSINGS} more grow (--json)"
    if checkup.crossings:
        yield "", "extrapolated by a least-squares line of log2(largest magnitude) over the step"


def describe_crossing(crossing: Crossing) -> str:
    """Return a sentence on how the largest value of a module grows."""
    growth = f"{crossing.module or 'the model'} grows by {number(crossing.doublings)} doublings in 1,000 steps"
    fit = f"{plural(crossing.num_points, 'checkpoint')}"
    if crossing.num_points > 2:  # a line always goes through two
        fit += f", off by at most {number(round(crossing.residual_bits, 3))} doublings"
    if crossing.step is None:
        return f"{growth}, and does not overflow fp16 within ten times the steps between these files ({fit})"
    return f"{growth}, and overflows fp16 at step {round(crossing.step):,} ({fit})"


def _table(layers: Sequence[LayerRange]) -> FittedTable:
    common = common_path(layer.module for layer in layers)
    names = [_name(layer) for layer in layers]
    values = [layer.values for layer in layers if layer.values is not None]
    columns = [
        Column(
            "module",
            names,
            short=(f"in {common[:-1]}", [name.removeprefix(common) for name in names]) if common else None,
            least=_MIN_NAME_WIDTH,
        ),
        Column("largest", [number(found.absmax) for found in values], right=True),
    ]
    for place, shown in enumerate(CHECKED_FORMATS):
        fits = [found.fit_in(shown) for found in values]
        cells = [literal(bits_text(fit.headroom_bits), _STYLES[fit.fit]) for fit in fits]
        columns.append(Column(shown.label, cells, right=True, spare=place))
    flushed = [percent(share) if (share := found.fit_in(FP16).flushed_share) else "-" for found in values]
    return FittedTable([*columns, Column("to 0 in fp16", flushed, right=True, spare=9)])


def _name(layer: LayerRange) -> str:
    return layer.module or f"({layer.type})"
