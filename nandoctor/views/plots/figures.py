"""The figure, the colour and the texts that plots share, and figures as image files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nandoctor.evidence.report import Report
from nandoctor.text import printable
from nandoctor.views.save import MARK

# Of Okabe and Ito's palette, told apart by colour-blind readers: https://jfly.uni-koeln.de/color/
NONFINITE_COLOR = "#D55E00"

_DPI = 150
_NOTEBOOK_DPI = 80
_WIDTH_IN = 8.0
_LEGEND_ROW_IN = 0.17
_TITLE_LETTERS, _LEGEND_LETTERS = 80, 128  # of a line


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, although pyplot does not manage it."""

    def _repr_png_(self) -> bytes:
        return image_of(self, "png", dpi=_NOTEBOOK_DPI)


def new_figure(height: float = 1.0) -> Figure:
    """Return a figure of `height` inches that pyplot does not manage."""
    figure = NotebookFigure(figsize=(_WIDTH_IN, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def image_of(figure: Figure, kind: str, *, dpi: int = _DPI) -> bytes:
    """Return the figure as a file: "png", "svg" (with text as text) or "pdf"."""
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
