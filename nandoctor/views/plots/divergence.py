"""The divergence plot: how far every layer's output is from fp32's, and how much of that came from its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nandoctor.diagnosis.run_summary import LARGE_ERROR, makes_error
from nandoctor.evidence.report import Report
from nandoctor.evidence.trace import describe_run
from nandoctor.text import percent, within
from nandoctor.views.layers import Layers, select_layers
from nandoctor.views.plots.figures import BLUE, GREY, MAX_BARS, ORANGE, SKY, draw_by_layer
from nandoctor.views.plots.ranges import draw_edges, fill_bars, mark_nonfinite, scale_panel

_FLOOR, _CEILING = 1e-8, 10.0
_MARKS_AT = 0.97


def draw_divergence(report: Report) -> Figure:
    """Draw the relative error of each call against fp32: the inherited part, and on top the part made here.

    Raises:
        NanDoctorError: the report holds no run, or no layer with a floating-point output.
    """
    rounding = report.runs.autocast.dtype.eps / 2 if report.runs else 0.0
    return draw_by_layer(
        report,
        lambda axes, layers: _draw_panel(axes, layers, rounding),
        finding=_write_finding(report),
        what="relative error of the sampled output elements that are finite, against fp32",
    )


def _write_finding(report: Report) -> str:
    """Return the first layer that makes a large error, or the largest error, and the first non-finite layer."""
    rows = [pair.autocast for pair in select_layers(report).pairs if pair.autocast is not None]
    run = report.runs.autocast if report.runs else None
    under = f" {describe_run(run.policy, run.dtype)}" if run else ""
    maker = next((row for row in rows if makes_error(row)), None)
    nonfinite = next((row for row in rows if not row.finite), None)
    ending = f" {nonfinite.place.label} is the first to be non-finite." if nonfinite else ""
    if maker is not None:
        inherited = f" of inputs {within(maker.inherited_err)}" if maker.inherited_err is not None else ""
        made = f"{maker.place.label} makes an error of {percent(maker.rel_err)}"
        return f"{made}{inherited}{under}.{ending}"
    errors = {row.place.label: row.rel_err for row in rows if row.rel_err is not None}
    if not errors:
        return f"No layer can be compared with fp32.{ending}"
    worst = max(errors, key=errors.__getitem__)
    carried = "carried on, not made, by" if errors[worst] > LARGE_ERROR else "in"
    return f"No layer makes a large error: the largest is {percent(errors[worst])}, {carried} {worst}.{ending}"


def _draw_panel(axes: Axes, layers: Layers, rounding: float) -> Sequence[Artist]:
    scale_panel(axes, layers, _find_limits(layers, rounding), "relative error")
    rows = [(index, pair.autocast) for index, pair in enumerate(layers.pairs) if pair.autocast is not None]
    wide, narrow = (1.0, 0.0) if len(layers.pairs) > MAX_BARS else (0.86, 0.4)
    kinds = (
        ("inherited from its inputs", SKY, [(x, row.inherited_err) for x, row in rows], wide),
        ("in its output", BLUE, [(x, row.rel_err) for x, row in rows if not makes_error(row)], narrow),
        ("made here", ORANGE, [(x, row.rel_err) for x, row in rows if makes_error(row)], narrow),
    )
    legend: list[Artist] = [_draw_bars(axes, *kind) for kind in kinds if any(error for _, error in kind[2])]
    # The error of one rounding to the format, and the limit above which an error counts as large.
    for height, name in ((rounding, "one\nrounding"), (LARGE_ERROR, "large")):
        if height:
            axes.axhline(height, color=GREY, linewidth=0.9, linestyle=":", zorder=1)
            axes.text(1.008, height, name, transform=axes.get_yaxis_transform(), va="center", size=8)
    nonfinite = [x for x, row in rows if not row.finite]
    return [*legend, *mark_nonfinite(axes, nonfinite, _MARKS_AT, "non-finite")]


def _find_limits(layers: Layers, rounding: float) -> tuple[float, float]:
    rows = [pair.autocast for pair in layers.pairs if pair.autocast is not None]
    errors = [error for row in rows for error in (row.rel_err, row.inherited_err) if error and math.isfinite(error)]
    least, most = min([*errors, rounding or 1e-4]), max([*errors, LARGE_ERROR])
    return max(least / 3, _FLOOR), min(max(most * 10, 1.0), _CEILING)


def _draw_bars(axes: Axes, label: str, color: str, errors: Sequence[tuple[int, float | None]], width: float) -> Artist:
    """Draw bars from the bottom of the panel up; only their top edges if `width` is 0."""
    bottom, top = axes.get_ylim()
    bars = [(x, bottom, min(max(error, bottom), top)) for x, error in errors if error]
    if width:
        fill_bars(axes, bars, width=width, color=color)
    draw_edges(axes, [(x, height) for x, _, height in bars], width or 1.0, color)
    return Patch(color=color, label=label)
