"""The figure and colours that all plots over a model's layers share, and writing image files."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Report
from nandoctor.text import brief, kinds_text, printable
from nandoctor.views.layers import Layers, select_layers
from nandoctor.views.save import MARK, PICTURE_ENDINGS, check_ending, write_bytes

# Okabe and Ito's palette, told apart by colour-blind readers: https://jfly.uni-koeln.de/color/
SKY, BLUE, ORANGE, GREY = "#56B4E9", "#0072B2", "#E69F00", "#999999"
NONFINITE_COLOR = "#D55E00"

MAX_BARS = 48
"""Of more layers the bars would be too thin to tell one in front of another, and their names would collide."""
MAX_VECTORS = 1500
"""More shapes than a panel has pixels are rasterized: a vector file of them would take long to open."""

_DPI = 150
_NOTEBOOK_DPI = 80
_WIDTH_IN = 8.0
_PANEL_HEIGHT_IN, _TEXT_HEIGHT_IN, _LETTER_IN = 3.2, 1.2, 0.065
_LEGEND_ROW_IN = 0.17
_TITLE_LETTERS, _LEGEND_LETTERS = 80, 128  # of a line
_FIRST_NAME_WIDTH, _NAME_WIDTH = 36, 44

DrawPanel = Callable[[Axes, Layers], Sequence[Artist]]
"""Draws all layers, x being their index, and returns what a legend should explain."""


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, although pyplot does not manage it."""

    def _repr_png_(self) -> bytes:
        return image_of(self, "png", dpi=_NOTEBOOK_DPI)


def draw_by_layer(report: Report, draw: DrawPanel, *, finding: str, what: str) -> Figure:
    """Draw all layers in execution order; `what` says what is drawn.

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
        figure = new_figure()
        axes = figure.subplots()
        marks = draw(axes, layers)
        _name_layers(axes, layers)
        _mark_first(axes, layers)
        longest = max(len(label.get_text()) for label in axes.get_xticklabels())
        figure.set_figheight(_TEXT_HEIGHT_IN + _PANEL_HEIGHT_IN + _LETTER_IN * longest)
        write_finding(figure, report, finding)
        source = brief(Path(report.dump.path).name, _FIRST_NAME_WIDTH)
        write_legend(figure, marks, f"{source}: layers in order of execution, {what}")
        return figure


def new_figure(height: float = 1.0) -> Figure:
    """Return a figure of `height` inches that pyplot does not manage."""
    figure = NotebookFigure(figsize=(_WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure in the format of its suffix: .png, .svg (with text as text) or .pdf.

    Raises:
        NanDoctorError: the suffix is unknown, or the file cannot be written.
    """
    check_ending(Path(path), PICTURE_ENDINGS)
    write_bytes(image_of(figure, Path(path).suffix[1:].lower()), path)


def image_of(figure: Figure, kind: str, *, dpi: int = _DPI) -> bytes:
    """Return the figure as a file: "png", "svg" or "pdf"."""
    file = io.BytesIO()
    metadata = {"png": {"Software": MARK}, "svg": {"Creator": MARK, "Date": None}}.get(kind, {"Creator": MARK})
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": MARK, "pdf.fonttype": 42}):
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def write_finding(figure: Figure, report: Report, finding: str) -> None:
    """Write above a plot the report's headline, and what the plot shows of it."""
    texts = (f"{report.headline.replace('`', '').rstrip('.')}.", finding)
    titles = [textwrap.fill(printable(text), _TITLE_LETTERS, max_lines=2, placeholder=" …") for text in texts]
    figure.suptitle("\n".join(titles), x=0.01, ha="left", size=11, weight="bold", parse_math=False)


def write_legend(figure: Figure, marks: Sequence[Artist], what: str) -> None:
    """Write below the panels what is drawn and what the marks mean; the figure grows by the lines needed."""
    lines = textwrap.wrap(what, _LEGEND_LETTERS)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_IN * (len(lines) - 1))
    columns = max(len(marks), 1)
    box = figure.legend(handles=marks, loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    box.set_title("\n".join(lines))
    box.get_title().set(size=8, parse_math=False)
    box.set_alignment("left")


def _name_layers(axes: Axes, layers: Layers) -> None:
    """Name every layer or, if they are too many, as many as have room, and the first non-finite one."""
    first = layers.first_nonfinite
    step = math.ceil(len(layers.pairs) / MAX_BARS)
    named = [index for index in range(0, len(layers.pairs), step) if first is None or abs(index - first) >= step]
    if first is not None:
        named = sorted([*named, first])
    # parse_math=False: a dollar sign in a name would start a formula, and an incomplete one raises when drawn.
    names = [brief(layers.pairs[index].label, _NAME_WIDTH) for index in named]
    axes.set_xticks(named, names, rotation=90, size=7.5, parse_math=False)
    axes.grid(axis="x", color="black", alpha=0.08, linewidth=0.6)
    for index, label in zip(named, axes.get_xticklabels(), strict=True):
        if index == first:
            label.set(color=NONFINITE_COLOR, weight="bold")


def _mark_first(axes: Axes, layers: Layers) -> None:
    """Draw a labelled line through the first non-finite layer, operation or array."""
    place, elements = layers.first_nonfinite, layers.elements
    if place is None or elements is None:
        return
    pair = layers.pairs[place]
    where = f"{'' if pair.name else 'the output of '}{brief(pair.label, _FIRST_NAME_WIDTH)}"
    axes.axvline(place, color=NONFINITE_COLOR, linewidth=1.2, linestyle="--", zorder=4)
    left, right = axes.get_xlim()
    alignment = ("left", "center", "right")[int(3 * (place - left) / (right - left))]  # inwards, near either end
    axes.annotate(
        f"first non-finite: {kinds_text(elements.kinds)} in {where}",
        (place, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha=alignment,
        size=8.5,
        color=NONFINITE_COLOR,
        weight="bold",
        parse_math=False,
    )
