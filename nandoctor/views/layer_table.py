"""Tables of layers, both runs side by side: those around the first non-finite one, or all of them."""

from __future__ import annotations

from collections.abc import Sequence

from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import LayerRow, Report, Runs
from nandoctor.evidence.trace import head_run
from nandoctor.text import bits_text, number, part_of, percent
from nandoctor.views.blocks import Column, Table, Tone, window
from nandoctor.views.layers import LayerPair, Layers, select_layers

_MIN_NAME_WIDTH, _MIN_TYPE_WIDTH = 14, 10
_MAX_NEAR = 6
_TIGHT_BITS = 1.0


def layers_near(report: Report) -> Table | None:
    """Return the layers around the first non-finite one, else around the tightest; None if nothing was run."""
    layers = select_layers(report)
    center = layers.tightest() if layers.first_nonfinite is None else layers.first_nonfinite
    if report.runs is None or center is None:
        return None
    shown = window(center, len(layers.pairs), _MAX_NEAR)
    pairs = [layers.pairs[index] for index in shown]
    names = [f"{'> ' if index == layers.first_nonfinite else '  '}{layers.pairs[index].label}" for index in shown]
    part = part_of(shown.stop, len(layers.pairs))
    headroom = f"headroom: doublings left before {report.runs.autocast.dtype} overflows"
    return Table(
        title=f"Largest magnitudes, layers {shown.start + 1:,} to {part} in execution order",
        columns=(Column("  layer", names, least=_MIN_NAME_WIDTH), *_number_columns(pairs, report.runs)),
        legend=headroom if layers.first_nonfinite is None else f"> first non-finite; {headroom}",
        tones=_tones(layers)[shown.start : shown.stop],
    )


def _number_columns(pairs: Sequence[LayerPair], runs: Runs) -> tuple[Column, ...]:
    """Return what is known of each layer: its class, the largest values of both runs, the error and the headroom."""
    heading = head_run(runs.autocast.policy, runs.autocast.dtype)
    heading = "as run" if heading == str(FP32) and not runs.are_one else heading
    errors = [_error(pair.autocast.rel_err if pair.autocast else None) for pair in pairs]
    headroom = [pair.headroom_bits for pair in pairs]
    compared = (
        Column("fp32", [_range(pair.fp32) for pair in pairs], right=True, spare=1),
        Column("rel err", errors, right=True, spare=2),
    )
    return (
        Column("type", [pair.either.place.type for pair in pairs], least=_MIN_TYPE_WIDTH, spare=3),
        Column(heading, [_range(pair.autocast) for pair in pairs], right=True),
        *(() if runs.are_one else compared),
        Column("headroom", [bits_text(bits) for bits in headroom], right=True, tones=list(map(_tone_of, headroom))),
    )


def _range(row: LayerRow | None) -> str:
    """Return the largest magnitude, or the kinds of non-finite values; "-" for a call that the run never finished."""
    if row is None or not row.outputs:
        return "-"
    if row.finite:
        return "-" if row.absmax is None else number(row.absmax)
    kinds = {kind for stats in row.outputs if stats.counts for kind in stats.counts.kinds}
    if not kinds:
        return "NaN/Inf"
    signs = "".join(sign for sign in "+-" if f"{sign}inf" in kinds).replace("+-", "±")
    return " ".join(filter(None, ("NaN" if "nan" in kinds else "", f"{signs}Inf" if signs else "")))


def _error(error: float | None) -> str:
    return "-" if error is None else percent(error)


def _tone_of(bits: float | None) -> Tone:
    """Return how good the news is that so many bits are left before overflow."""
    if bits is None:
        return ""
    return "failed" if bits < 0 else "unclear" if bits < _TIGHT_BITS else "good"


def _tones(layers: Layers) -> list[Tone]:
    tones: list[Tone] = ["" if pair.finite else "failed" for pair in layers.pairs]
    if layers.first_nonfinite is not None:
        tones[layers.first_nonfinite] = "first"
    return tones


def every_layer(report: Report) -> Table | None:
    """Return all calls in execution order: a container returns after what is inside it."""
    if report.runs is None:
        return None
    layers = select_layers(report, every=True)
    inherited = [_error(pair.autocast.inherited_err if pair.autocast else None) for pair in layers.pairs]
    *numbers, headroom = _number_columns(layers.pairs, report.runs)
    compared = "" if report.runs.are_one else " rel err: relative error against fp32; inherited: that of the inputs."
    some_in_fp32 = "; autocast computes some layers in fp32" if numbers[1].heading == "autocast" else ""
    return Table(
        columns=(
            Column("layer", [pair.label for pair in layers.pairs]),
            *numbers,
            *([Column("inherited", inherited, right=True)] if compared else []),
            headroom,
        ),
        legend=f"{', '.join(column.heading for column in numbers[1:3])}: largest finite magnitudes{some_in_fp32}."
        f"{compared} headroom: doublings left before {report.runs.autocast.dtype} overflows, by the fp32 value where "
        "there is one.",
        tones=_tones(layers),
        is_searchable=True,
    )
