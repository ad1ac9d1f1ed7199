"""The figure and colours that all plots over a model's layers share, and writing image files."""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib
import matplotlib.style
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import FirstNonfinite, Report
from nandoctor.renderers.layers import LayerPair, Layers, select_layers
from nandoctor.renderers.save import MARK, PICTURE_ENDINGS, check_ending, write_bytes
from nandoctor.text import brief, kinds_text, plural, printable

# Okabe and Ito's palette, told apart by colour-blind readers: https://jfly.uni-koeln.de/color/
SKY, BLUE, ORANGE, GREY = "#56B4E9", "#0072B2", "#E69F00", "#999999"
NONFINITE_COLOR = "#D55E00"

MAX_BARS = 48
MAX_VECTORS = 1500
"""More shapes than a panel has pixels are rasterized: a vector file of them would take long to open."""

_DPI = 150
_NOTEBOOK_DPI = 80
_ZOOM = (26, 13)  # layers before and after the one in question
_NARROW = (6, 3)
_WIDTH_IN, _NARROW_WIDTH_IN = 8.0, 3.2  # their text is at least 10 px high on a tablet, 11 px on a phone
_PANEL_HEIGHT_IN, _TEXT_HEIGHT_IN, _LETTER_IN = 3.2, 1.2, 0.065
_LEGEND_ROW_IN = 0.17
_LETTERS_PER_IN, _MAX_TITLE_LINES = 10, 3
_SMALL_LETTERS_PER_IN = 16
_FIRST_NAME_WIDTH = 36

DrawPanel = Callable[[Axes, Layers, range], Sequence[Artist]]
"""Draws the layers at these indices, x being the index, and returns what a legend should explain."""
_NAME_WIDTH = 44
_MAX_NAMES = 52
_FAIR_NUMBER = 12
_MAX_DEPTH = 6


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, although pyplot does not manage it."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw everything; while saving, matplotlib calls this twice, the first time only to compute the layout."""
        engine = self.get_layout_engine()
        if self.canvas.is_saving() and isinstance(engine, ConstrainedLayoutEngine):
            engine.execute(self)
        else:
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=_NOTEBOOK_DPI)
        return image.getvalue()


def draw_by_layer(report: Report, draw: DrawPanel, *, finding: str, what: str, narrow: bool) -> Figure:
    """Draw all layers in execution order and, if they are many, a zoomed panel below; `what` says what is drawn.

    A `narrow` figure, for a phone, has a few layers around the first non-finite one, else around the tightest.

    Raises:
        NanDoctorError: the report holds no run, or no layer with a floating-point output.
    """
    layers = select_layers(report)
    if report.runs is None or not layers.pairs:
        raise NanDoctorError(
            f"There are no layers to draw for {report.dump.path}: nothing was run, or no layer returned numbers.",
            remedy="Replay a dump that holds the failing batch; `nandoctor inspect` shows what is in it.",
        )
    num_layers = len(layers.pairs)
    center = layers.first_nonfinite if layers.first_nonfinite is not None else layers.tightest() or 0
    shown = [layers.window(center, *_NARROW) if narrow else range(num_layers)]
    if len(shown[0]) > MAX_BARS:
        shown.append(layers.window(center, *_ZOOM))
    part = f"layers {shown[0].start + 1:,} to {shown[0].stop:,} of {num_layers:,}"
    drawn = part if len(shown[0]) < num_layers else plural(num_layers, "layer")
    with matplotlib.style.context("default"):
        figure, marks = _draw(report, layers, draw, shown, narrow=narrow)
        write_finding(figure, finding)
        source = brief(Path(report.dump.path).name, _FIRST_NAME_WIDTH)
        write_legend(figure, marks, f"{source}: {drawn} in order of execution, {what}", narrow=narrow)
        return figure


def new_figure(height: float = 1.0, *, narrow: bool) -> Figure:
    """Return a figure of `height` inches, as wide as a page or a phone, that pyplot does not manage."""
    figure = NotebookFigure(figsize=(_NARROW_WIDTH_IN if narrow else _WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure in the format of its suffix: .png, .svg (with text as text) or .pdf.

    Raises:
        NanDoctorError: the suffix is unknown, or the file cannot be written.
    """
    check_ending(Path(path), PICTURE_ENDINGS)
    suffix, image = Path(path).suffix[1:].lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(image, format=suffix, dpi=_DPI, metadata={"Software" if suffix == "png" else "Creator": MARK})
    write_bytes(image.getvalue(), path)


def _draw(
    report: Report, layers: Layers, draw: DrawPanel, shown: Sequence[range], *, narrow: bool
) -> tuple[Figure, Sequence[Artist]]:
    """Draw one panel per part of the layers; return the figure and the artists for its legend."""
    figure = new_figure(narrow=narrow)
    panels = list(figure.subplots(len(shown), squeeze=False)[:, 0])
    legends = [draw(axes, layers, part) for axes, part in zip(panels, shown, strict=True)]
    for axes, part in zip(panels, shown, strict=True):
        name_layers(axes, layers, part)
        _mark_first(axes, report.first_nonfinite, layers, named=part == shown[0] and not narrow)
    for part in shown[1:]:
        panels[0].axvspan(part.start - 0.5, part.stop - 0.5, fill=False, linewidth=0.8, linestyle=":")
        title = f"layers {part.start + 1:,} to {part.stop:,} of {len(layers.pairs):,}, the dotted part above"
        panels[1].set_title(title, loc="left", size=8.5, color="#444444")
    longest = [max(len(label.get_text()) for label in axes.get_xticklabels()) for axes in panels]
    figure.set_figheight(_TEXT_HEIGHT_IN + sum(_PANEL_HEIGHT_IN + _LETTER_IN * letters for letters in longest))
    return figure, legends[0]


def _mark_first(axes: Axes, first: FirstNonfinite | None, layers: Layers, *, named: bool) -> None:
    """Draw a labelled line through the first non-finite layer, or before the layer that got a non-finite input."""
    if first is None or layers.first_nonfinite is None:
        return
    place = layers.first_nonfinite - (0.5 if layers.before_nonfinite else 0)
    axes.axvline(place, color=NONFINITE_COLOR, linewidth=1.2, linestyle="--", zorder=4)
    left, right = axes.get_xlim()
    alignment = ("left", "center", "right")[int(3 * (place - left) / (right - left))]  # inwards, near either end
    axes.annotate(
        f"first non-finite: {_describe_first(first)}" if named else "first non-finite",
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


def _describe_first(first: FirstNonfinite) -> str:
    kinds = kinds_text(first.elements.kinds)
    if first.where == "batch":
        return f"{kinds} in the saved batch"
    name = brief(first.place.label, _FIRST_NAME_WIDTH)
    return f"{kinds} in the {'output' if first.where == 'output' else 'forward'} of {name}"


def write_finding(figure: Figure, finding: str) -> None:
    """Write what the plot shows above all panels."""
    letters = int(figure.get_figwidth() * _LETTERS_PER_IN)
    title = textwrap.fill(printable(finding), letters, max_lines=_MAX_TITLE_LINES, placeholder=" …")
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold", parse_math=False)


def write_legend(figure: Figure, marks: Sequence[Artist], what: str, *, narrow: bool) -> None:
    """Write below the panels what is drawn and what the marks mean; the figure grows by the lines needed."""
    columns = 1 if narrow else max(len(marks), 1)
    lines = textwrap.wrap(what, int(figure.get_figwidth() * _SMALL_LETTERS_PER_IN))
    rows = len(lines) - 1 + (len(marks) - 1 if narrow else 0)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_IN * rows)
    box = figure.legend(handles=marks, loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    box.set_title("\n".join(lines))
    box.get_title().set(size=8, parse_math=False)
    box.set_alignment("left")


def name_layers(axes: Axes, layers: Layers, shown: range) -> None:
    """Name the layers at the indices `shown`: each of them or, if they are too many, their blocks."""
    each = [(index, layers.pairs[index].label) for index in shown]
    named = _choose(layers) if len(shown) > MAX_BARS else each
    # parse_math=False: a dollar sign in a name would start a formula, and an incomplete one raises when drawn.
    names = [brief(name, _NAME_WIDTH) for _, name in named]
    axes.set_xticks([index for index, _ in named], names, rotation=90, size=7.5, parse_math=False)
    axes.grid(axis="x", color="black", alpha=0.08, linewidth=0.6)
    for (index, _), label in zip(named, axes.get_xticklabels(), strict=True):
        if index == layers.first_nonfinite:
            label.set(color=NONFINITE_COLOR, weight="bold")


def _choose(layers: Layers) -> list[tuple[int, str]]:
    """Return the first non-finite layer and the starts of blocks, without those whose names would collide."""
    wanted = _block_starts(layers.pairs)
    if layers.first_nonfinite is not None:
        wanted.insert(0, (layers.first_nonfinite, layers.pairs[layers.first_nonfinite].label))
    chosen: list[tuple[int, str]] = []
    for index, name in wanted:
        if all(abs(index - other) >= len(layers.pairs) / _MAX_NAMES for other, _ in chosen):
            chosen.append((index, name))
    return sorted(chosen)


def _block_starts(pairs: Iterable[LayerPair]) -> list[tuple[int, str]]:
    """Return the start and path of each block, from the coarsest split of the model with enough blocks."""
    modules = [pair.place.module.split(".") for pair in pairs]
    starts: list[tuple[int, str]] = []
    for depth in range(1, _MAX_DEPTH + 1):
        blocks = [".".join(steps[:depth]) for steps in modules]
        starts = [(i, block) for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
        if len(starts) >= _FAIR_NUMBER:
            break
    return starts


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"#([\w-]+)")
_READABLE_PX = 10.0


def figure_svg(figure: Figure, *, prefix: str, title: str) -> Markup:
    """Return the figure as SVG; unused ids are dropped, the others get `prefix`.

    Its minimum width keeps the text readable: a narrow page scrolls it.
    """
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(file.getvalue())
    _rename(root, prefix)
    sizes = [float(text.get_fontsize()) for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    min_width = round(figure.get_figwidth() * 72 * _READABLE_PX / min(sizes, default=_READABLE_PX))
    root.attrib |= {"role": "img", "aria-label": title, "width": "100%", "style": f"min-width: {min_width}px"}
    root.attrib.pop("height", None)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    return Markup(ET.tostring(root, encoding="unicode"))


def for_page_and_phone(wide: Markup, narrow: Markup) -> Markup:
    """Return both drawings; the page shows the one that fits."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


def _rename(root: ET.Element, prefix: str) -> None:
    """Make the ids that are referred to unique on the page by a prefix, and drop the others."""
    elements = list(root.iter())
    used = {name for element in elements for value in element.attrib.values() for name in _REFERENCE.findall(value)}
    for element in elements:
        name = element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key.endswith("href") or "url(#" in value:
                element.set(key, _REFERENCE.sub(rf"#{prefix}-\1", value) if not value.startswith("data:") else value)
        if name in used:
            element.set("id", f"{prefix}-{name}")
