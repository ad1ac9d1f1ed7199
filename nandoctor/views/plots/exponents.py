"""The exponents plot: how every layer's values are distributed over binary exponents, with the format's limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import Report
from nandoctor.text import percent
from nandoctor.views.commands import PER_SAMPLE, command_for
from nandoctor.views.layers import LayerPair, Layers, select_layers
from nandoctor.views.plots.figures import NONFINITE_COLOR, ORANGE, draw_by_layer

_COLORS = "cividis"
_MARGIN = 2
_FAR = 24
_SMALLEST_SHARE = 1e-4

Histogram = Mapping[int, int]


def draw_exponents(report: Report) -> Figure:
    """Draw the share of each layer's non-zero elements by exponent, from the fp32 run if it has counts.

    fp32 shows what the low-precision format would have to hold.

    Raises:
        NanDoctorError: the report has no per-sample statistics.
    """
    layers = select_layers(report)
    histograms = [_histogram(pair) for pair in layers.pairs]
    if report.runs is None or not any(histograms):
        raise NanDoctorError(
            f"The report on {report.dump.path} has no counts of exponents.",
            remedy=f"Count them: {command_for('plot', report, '--kind exponents') or PER_SAMPLE}",
        )
    low = report.runs.autocast.dtype
    limits = _find_limits(histograms, low)
    return draw_by_layer(
        report,
        lambda axes, _: _draw_panel(axes, histograms, limits, low),
        finding=_write_finding(layers, histograms, low),
        what="share of the non-zero elements of its fp32 output that have each exponent",
    )


def _histogram(pair: LayerPair) -> Histogram:
    for row in (pair.fp32, pair.autocast):
        counts: Counter[int] = Counter()
        for stats in row.outputs if row is not None else ():
            counts.update(dict(stats.counts.exponents) if stats.counts is not None else {})
        if counts:
            return counts
    return {}


def _find_limits(histograms: Sequence[Histogram], low: FloatFormat) -> tuple[int, int]:
    """Return the limits of the exponents to show: all that occur, and the format's limits if they are near."""
    seen = [exponent for counts in histograms for exponent in counts]
    lowest, highest = min(seen), max(seen)
    if lowest - _zero_exponent(low) < _FAR:
        lowest = min(lowest, _zero_exponent(low))
    if low.max_exponent - highest < _FAR:
        highest = max(highest, low.max_exponent)
    return lowest - _MARGIN, highest + _MARGIN


def _zero_exponent(low: FloatFormat) -> int:
    return low.min_exponent - low.fraction_bits


def _write_finding(layers: Layers, histograms: Sequence[Histogram], low: FloatFormat) -> str:
    """Return which layers have the largest share of elements beyond either end of the format."""
    beyond = [_share(counts, lambda exponent: exponent > low.max_exponent) for counts in histograms]
    small = [_share(counts, lambda exponent: exponent < low.min_exponent) for counts in histograms]
    lost = max(range(len(small)), key=small.__getitem__)
    ending = f"no value is subnormal or 0 in {low}"
    if small[lost]:
        ending = f"at most {percent(small[lost])} of one are subnormal or 0 in {low} ({layers.pairs[lost].label})"
    if any(beyond):
        worst = max(range(len(beyond)), key=beyond.__getitem__)
        share = "every value" if beyond[worst] == 1 else f"{percent(beyond[worst])} of the values"
        return f"{layers.pairs[worst].label}: {share} would overflow {low}; {ending}."
    return f"Every layer's output fits {low}; {ending}."


def _share(counts: Histogram, wanted: Callable[[int], bool]) -> float:
    return sum(count for exponent, count in counts.items() if wanted(exponent)) / max(sum(counts.values()), 1)


def _draw_panel(axes: Axes, histograms: Sequence[Histogram], limits: tuple[int, int], low: FloatFormat) -> list[Artist]:
    bottom, top = limits
    image = np.full((top - bottom + 1, len(histograms)), np.nan)
    for column, counts in enumerate(histograms):
        for exponent, count in counts.items():
            image[exponent - bottom, column] = count / sum(counts.values())
    axes.imshow(
        np.log10(np.maximum(image, _SMALLEST_SHARE)),
        origin="lower",
        aspect="auto",
        extent=(-0.5, len(histograms) - 0.5, bottom - 0.5, top + 0.5),
        cmap=_COLORS,
        vmin=math.log10(_SMALLEST_SHARE),
        vmax=0,
        interpolation="nearest",
    )
    axes.set_ylabel("binary exponent e (value ~ 2^e)")
    _draw_limits(axes, low)
    colors = axes.images[0].cmap
    shares = (("0.01 % or less", 0.0), ("1 %", 0.5), ("all", 1.0))
    return [Patch(color=colors(place), label=name) for name, place in shares]


def _draw_limits(axes: Axes, low: FloatFormat) -> None:
    """Draw lines at the format's limits, if they are within the panel."""
    bottom, top = axes.get_ylim()
    lines = (
        (low.max_exponent + 0.5, NONFINITE_COLOR, "bottom", f"{low} overflow"),
        (low.min_exponent - 0.5, ORANGE, "top", "subnormal"),
        (_zero_exponent(low) - 0.5, ORANGE, "top", "zero"),
    )
    for height, color, edge, name in lines:
        if bottom < height < top:
            axes.axhline(height, color=color, linewidth=1.2, zorder=3)
            axes.text(1.008, height, name, transform=axes.get_yaxis_transform(), va=edge, size=8)
