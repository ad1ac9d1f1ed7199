"""Show the first affected sample on the page: an image, a line plot of a signal, or token ids, and a caption."""

from __future__ import annotations

import base64
import io

import matplotlib.image
import matplotlib.style
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nandoctor.evidence.exhibits import Picture, SampleView, Signal, TokenIds
from nandoctor.renderers.plots.figures import NONFINITE_COLOR, image_of, new_figure
from nandoctor.renderers.plots.origin import picture_levels
from nandoctor.text import are, number, plural

_HEIGHT_IN = 1.9
_HOLE_ALPHA = 0.4
_COLORS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")


def caption(view: SampleView) -> str:
    """Return the caption after the sample's name: ", every value 0", ", 3 channels over 16 places"."""
    if isinstance(view, Picture):
        return _caption_of_picture(view)
    if isinstance(view, TokenIds):
        return f", {plural(view.length, 'id')}{_only(len(view.ids), view.length)}"
    pieces = len(view.lows[0])
    limits = f", drawn as the range of each of {pieces} pieces" if pieces < view.length else ""
    channels = plural(view.num_channels, "channel") + _only(len(view.lows), view.num_channels)
    return f", {channels} over the {plural(view.length, 'place')} of dimension {view.dim}{limits}"


def _caption_of_picture(view: Picture) -> str:
    if view.low is None or view.high is None:
        return ", every value non-finite"
    if is_flat(view):
        return f", every value {number(view.low)}"
    nonfinite = f", {view.num_bad:,} {are(view.num_bad)} non-finite" if view.num_bad else ""
    return f", {number(view.low)} to {number(view.high)}{nonfinite}; averaged over its channels, at most 64 x 64"


def _only(shown: int, there_are: int) -> str:
    return f" (the first {shown} shown)" if shown < there_are else ""


def is_flat(view: SampleView) -> bool:
    """Return True for an image with a single value, which a sentence describes as well as a grey square."""
    return isinstance(view, Picture) and (view.low is None or (view.low == view.high and not view.num_bad))


def view_html(view: SampleView) -> Markup:
    """Return the image, the curves or the ids; nothing if the caption says it all."""
    if is_flat(view):
        return Markup()
    if isinstance(view, TokenIds):
        more = " ..." if len(view.ids) < view.length else ""
        return Markup("<pre>{}{}</pre>").format(" ".join(map(str, view.ids)), more)
    title = f"Sample {view.sample} of {view.name}"
    if isinstance(view, Signal):
        return as_element(image_of(_curves(view), "svg"), "svg+xml", title)
    image = io.BytesIO()
    matplotlib.image.imsave(image, picture_levels(view), cmap="gray", vmin=0, vmax=255, format="png")
    return as_element(image.getvalue(), "png", title)


def as_element(image: bytes, kind: str, title: str) -> Markup:
    """Return an image of a MIME type as an element of a page."""
    data = base64.b64encode(image).decode()
    return Markup('<img src="data:image/{};base64,{}" alt="{}">').format(kind, data, title)


def _curves(view: Signal) -> Figure:
    with matplotlib.style.context("default"):
        figure = new_figure(_HEIGHT_IN)
        axes = figure.subplots()
        for curve in range(len(view.lows)):
            _draw_curve(axes, view, curve)
        axes.set_xlim(0, view.length)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(f"dimension {view.dim}", size=8)
        if legend := _make_legend(view):
            figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False, fontsize=8)
        return figure


def _make_legend(view: Signal) -> list[Patch]:
    """Return handles that name the channels, if there are several, and the mark of non-finite pieces."""
    channels = [Patch(color=_COLORS[curve], label=f"channel {curve}") for curve in range(len(view.lows))]
    holed = any(limit is None for limits in view.lows for limit in limits)
    holes = [Patch(color=NONFINITE_COLOR, alpha=_HOLE_ALPHA, label="non-finite")] if holed else []
    return [*(channels if len(channels) > 1 else []), *holes]


def _draw_curve(axes: Axes, view: Signal, curve: int) -> None:
    """Draw the band between the limits of each piece, and mark non-finite pieces."""
    color = _COLORS[curve]
    lows, highs = (np.array(limits[curve], dtype=float) for limits in (view.lows, view.highs))  # None becomes NaN
    edges = np.linspace(0, view.length, len(lows) + 1)
    axes.stairs(highs, edges, baseline=lows, fill=True, color=color, alpha=0.5, linewidth=0)
    axes.plot((edges[:-1] + edges[1:]) / 2, (lows + highs) / 2, color=color, linewidth=0.9)
    holes = np.isnan(lows)
    for left, right in zip(edges[:-1][holes], edges[1:][holes], strict=True):
        axes.axvspan(left, right, color=NONFINITE_COLOR, alpha=_HOLE_ALPHA, linewidth=0)
