"""The ranges plot: bands for the format, bars for the runs, marks for non-finite values.

It imports matplotlib, and is imported only where something is drawn.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import LayerRow, Report, Runs
from nandoctor.text import brief, number, printable
from nandoctor.views.layers import Layers, name_runs, select_layers
from nandoctor.views.save import MARK

# Of Okabe and Ito's palette, told apart by colour-blind readers: https://jfly.uni-koeln.de/color/
SKY, BLUE, ORANGE, GREY, VERMILION = "#56B4E9", "#0072B2", "#E69F00", "#999999", "#D55E00"
MAX_NAMES = 48
"""Of more layers not all are named: the names would collide."""
_DPI, _NOTEBOOK_DPI = 150, 80
_WIDTH_IN, _PANEL_HEIGHT_IN, _TEXT_HEIGHT_IN, _LETTER_IN, _LEGEND_ROW_IN = 8.0, 3.2, 1.2, 0.065, 0.17
_TITLE_LETTERS, _LEGEND_LETTERS = 80, 128  # of a line
_FIRST_NAME_WIDTH, _NAME_WIDTH = 36, 44
_WHAT = "bars from the 5 % quantile of non-zero magnitudes to the largest, line at the median"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NEARBY = 1e9
"""A limit of the format further than this factor from every value is left out of the panel."""
_BEYOND = 1e3
"""The factor by which the panel extends past a limit of the format."""
_CLIP = 1e8
"""Values further past the limits than this factor are cut off: a value of 1e30 must not squash all others."""


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, although pyplot does not manage it."""

    def _repr_png_(self) -> bytes:
        return image_of(self, "png", dpi=_NOTEBOOK_DPI)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStyle:
    """The look of one run: its bars, its marks for non-finite values, and their height as a share of the panel's."""

    name: str
    color: str
    alpha: float
    width: float
    median_color: str
    mark: str
    mark_at: float


def draw_ranges(report: Report) -> Figure:
    """Draw the absolute values of every layer's output in execution order, autocast over fp32.

    A bar reaches from the 5 % quantile of the non-zero magnitudes to the largest finite one, with a tick at the
    median. The figure is independent of pyplot and of the user's style.

    Raises:
        NanDoctorError: the report holds no run, or no layer with a floating-point output.
    """
    layers = select_layers(report)
    if report.runs is None or not layers.pairs:
        raise NanDoctorError(
            f"There are no layers to draw for {report.dump.path}: nothing was run, or no layer returned numbers.",
            remedy="Replay a dump that holds the failing batch; `nandoctor inspect` shows what is in it.",
        )
    with matplotlib.style.context("default"):
        figure = NotebookFigure(figsize=(_WIDTH_IN, 1.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        marks = _draw_panel(axes, report.runs, layers)
        _name_layers(axes, layers)
        _mark_failure(axes, layers)
        longest = max(len(label.get_text()) for label in axes.get_xticklabels())
        figure.set_figheight(_TEXT_HEIGHT_IN + _PANEL_HEIGHT_IN + _LETTER_IN * longest)
        title = textwrap.fill(
            printable(report.headline.replace("`", "")), _TITLE_LETTERS, max_lines=2, placeholder=" …"
        )
        figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold", parse_math=False)
        source = brief(Path(report.dump.path).name, _FIRST_NAME_WIDTH)
        _write_legend(figure, marks, f"{source}: layers in order of execution, {_WHAT}")
        return figure


def image_of(figure: Figure, kind: str, *, dpi: int = _DPI) -> bytes:
    """Return the figure as a file: "png", "svg" (with text as text) or "pdf"."""
    file = io.BytesIO()
    metadata = {"png": {"Software": MARK}, "svg": {"Creator": MARK, "Date": None}}.get(kind, {"Creator": MARK})
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": MARK, "pdf.fonttype": 42}):
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def _draw_panel(axes: Axes, runs: Runs, layers: Layers) -> list[Artist]:
    """Draw the bars of both runs, and return the artists for the legend."""
    low = runs.autocast.dtype
    axes.set_yscale("log")
    axes.set_ylim(*_find_limits(low, layers))
    axes.set_xlim(-0.7, len(layers.pairs) - 0.3)
    axes.set_ylabel("absolute value")
    # Labels are plain text: matplotlib's formulas take as long as all the rest.
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "10" + str(round(math.log10(value))).translate(_SUPERSCRIPTS))
    )
    _draw_bands(axes, low)
    name, own_name = name_runs(runs)
    fp32 = RunStyle(name=name, color=SKY, alpha=0.5, width=0.86, median_color=BLUE, mark="^", mark_at=0.92)
    autocast = RunStyle(name=own_name, color=BLUE, alpha=1, width=0.4, median_color="white", mark="v", mark_at=0.97)
    series = [(fp32, [pair.fp32 for pair in layers.pairs])]
    if not runs.are_one:
        series.append((autocast, [pair.autocast for pair in layers.pairs]))
    legend: list[Artist] = []
    for style, rows in series:
        drawn = [(x, row) for x, row in enumerate(rows) if row is not None and row.outputs]
        legend.append(_draw_bars(axes, drawn, style))
        if nonfinite := [x for x, row in drawn if not row.finite]:
            heights, placed = [style.mark_at] * len(nonfinite), axes.get_xaxis_transform()
            marks = axes.scatter(nonfinite, heights, s=22, c=VERMILION, marker=style.mark, transform=placed, zorder=5)
            marks.set_label(f"non-finite, {style.name}")
            legend.append(marks)
    return legend


def spread_of(row: LayerRow) -> tuple[float, float, float]:
    """Return the low end, the median and the high end of all outputs of a call together, NaN where there is none.

    They are non-zero finite magnitudes; the median is the largest output's. A non-finite tensor without exact counts
    has quantiles of its sample but no maximum; its 95 % quantile is used.
    """
    largest = max(row.outputs, key=lambda stats: stats.numel)
    low = min(_positive(stats.p05 for stats in row.outputs), default=math.nan)
    tops = (stats.p95 if stats.absmax is None else stats.absmax for stats in row.outputs)
    return low, next(_positive([largest.median]), math.nan), max(_positive(tops), default=math.nan)


def _positive(values: Iterable[float | None]) -> Iterator[float]:
    return (value for value in values if value is not None and value > 0)


def _find_limits(low: FloatFormat, layers: Layers) -> tuple[float, float]:
    """Return the smallest and largest magnitude to show: all values, and the format's limits if they are near."""
    rows = (row for pair in layers.pairs for row in pair.rows if row.outputs)
    values = list(_positive(value for row in rows for value in spread_of(row))) or [1.0]
    bottom, top = min(values) / _BEYOND**0.5, max(values) * _BEYOND**0.5
    if low.flush_threshold > min(values) / _NEARBY:
        bottom = max(min(bottom, low.flush_threshold / _BEYOND**0.5), low.flush_threshold / _CLIP)
    if low.max < max(values) * _NEARBY:
        top = min(max(top, low.max * _BEYOND), low.max * _CLIP)
    return min(bottom, low.max), max(top, low.smallest_normal)


def _draw_bands(axes: Axes, low: FloatFormat) -> None:
    bottom, top = axes.get_ylim()
    bands = (
        (low.max, top, VERMILION, 0.14, f"{low} overflow\n> {number(low.max)}"),
        (low.flush_threshold, low.smallest_normal, ORANGE, 0.16, f"subnormal\n< {number(low.smallest_normal)}"),
        (bottom, low.flush_threshold, GREY, 0.35, f"zero\n< {number(low.flush_threshold)}"),
    )
    for least, most, color, alpha, name in bands:
        start, stop = max(least, bottom), min(most, top)
        if start < stop:
            axes.axhspan(start, stop, color=color, alpha=alpha, linewidth=0, zorder=0)
            axes.text(1.008, (start * stop) ** 0.5, name, transform=axes.get_yaxis_transform(), va="center", size=8)


def _draw_bars(axes: Axes, drawn: Sequence[tuple[int, LayerRow]], style: RunStyle) -> Artist:
    """Draw the bars of one run, and on each a line at its median and one at its top."""
    low, median, high = np.array([spread_of(row) for _, row in drawn]).reshape(-1, 3).T
    low = np.where(np.isnan(low), high, low)
    middle = np.array([x for x, _ in drawn])
    left, right = middle - style.width / 2, middle + style.width / 2
    # One collection, since matplotlib is slow with many single bars.
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)[~np.isnan(high)]
    collection = PolyCollection(corners, facecolors=style.color, alpha=style.alpha, linewidths=0, zorder=2)
    axes.add_collection(collection, autolim=False)
    # The top edge is drawn separately and last: the bar of a layer with equal values has no height.
    for edge, color in ((median, style.median_color), (high, style.color)):
        known = ~np.isnan(edge)
        axes.hlines(edge[known], left[known], right[known], color=color, linewidth=1.2, zorder=3)
    return Patch(color=style.color, alpha=style.alpha, label=style.name)


def _name_layers(axes: Axes, layers: Layers) -> None:
    """Name every layer or, if they are too many, as many as have room, and the first non-finite one."""
    first = layers.first_nonfinite
    step = math.ceil(len(layers.pairs) / MAX_NAMES)
    named = [index for index in range(0, len(layers.pairs), step) if first is None or abs(index - first) >= step]
    if first is not None:
        named = sorted([*named, first])
    # parse_math=False: a dollar sign in a name would start a formula, and an incomplete one raises when drawn.
    names = [brief(layers.pairs[index].place.label, _NAME_WIDTH) for index in named]
    axes.set_xticks(named, names, rotation=90, size=7.5, parse_math=False)
    axes.grid(axis="x", color="black", alpha=0.08, linewidth=0.6)
    for index, label in zip(named, axes.get_xticklabels(), strict=True):
        if index == first:
            label.set(color=VERMILION, weight="bold")


def _mark_failure(axes: Axes, layers: Layers) -> None:
    """Draw a labelled line through the first non-finite layer."""
    place = layers.first_nonfinite
    if place is None:
        return
    axes.axvline(place, color=VERMILION, linewidth=1.2, linestyle="--", zorder=4)
    left, right = axes.get_xlim()
    alignment = ("left", "center", "right")[int(3 * (place - left) / (right - left))]  # inwards, near either end
    axes.annotate(
        f"first non-finite: {brief(layers.pairs[place].place.label, _FIRST_NAME_WIDTH)}",
        (place, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha=alignment,
        size=8.5,
        color=VERMILION,
        weight="bold",
        parse_math=False,
    )


def _write_legend(figure: Figure, marks: Sequence[Artist], what: str) -> None:
    """Write below the panels what is drawn and what the marks mean; the figure grows by the lines needed."""
    lines = textwrap.wrap(what, _LEGEND_LETTERS)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_IN * (len(lines) - 1))
    box = figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False, fontsize=8)
    box.set_title("\n".join(lines))
    box.get_title().set(size=8, parse_math=False)
    box.set_alignment("left")
