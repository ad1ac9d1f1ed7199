"""Show the first affected sample on the page: an image or token ids, and a caption."""

from __future__ import annotations

import base64
import io

import matplotlib.image
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from nandoctor.errors import ReportError
from nandoctor.evidence.exhibits import Picture, SampleView, TokenIds
from nandoctor.text import are, number, plural


def caption(view: SampleView) -> str:
    """Return the caption after the sample's name: ", every value 0", ", 3 channels over 16 places"."""
    if isinstance(view, Picture):
        return _caption_of_picture(view)
    if isinstance(view, TokenIds):
        return f", {plural(view.length, 'id')}{_only(len(view.ids), view.length)}"
    known = [limit for limits in (*view.lows, *view.highs) for limit in limits if limit is not None]
    reach = f", {number(min(known))} to {number(max(known))}" if known else ""
    holed = ", in parts non-finite" if any(None in limits for limits in view.lows) else ""
    channels = plural(view.num_channels, "channel") + _only(len(view.lows), view.num_channels)
    return f", {channels} over the {plural(view.length, 'place')} of dimension {view.dim}{reach}{holed}"


def _caption_of_picture(view: Picture) -> str:
    if view.low is None or view.high is None:
        return ", every value non-finite"
    if _is_flat(view):
        return f", every value {number(view.low)}"
    nonfinite = f", {view.num_bad:,} {are(view.num_bad)} non-finite" if view.num_bad else ""
    return f", {number(view.low)} to {number(view.high)}{nonfinite}; averaged over its channels, at most 64 x 64"


def _only(shown: int, there_are: int) -> str:
    return f" (the first {shown} shown)" if shown < there_are else ""


def _is_flat(view: Picture) -> bool:
    """Return True for an image with a single value, which a sentence describes as well as a grey square."""
    return view.low is None or (view.low == view.high and not view.num_bad)


def view_html(view: SampleView) -> Markup:
    """Return the image or the ids; nothing if the caption says it all."""
    if isinstance(view, TokenIds):
        more = " ..." if len(view.ids) < view.length else ""
        return Markup("<pre>{}{}</pre>").format(" ".join(map(str, view.ids)), more)
    if not isinstance(view, Picture) or _is_flat(view):
        return Markup()
    image = io.BytesIO()
    matplotlib.image.imsave(image, _picture_levels(view), cmap="gray", vmin=0, vmax=255, format="png")
    return as_element(image.getvalue(), "png", f"Sample {view.sample} of {view.name}")


def _picture_levels(picture: Picture) -> NDArray[np.uint8]:
    """Return the grey levels, height x width; raise ReportError if there are not as many."""
    try:
        return np.frombuffer(base64.b64decode(picture.pixels), dtype=np.uint8).reshape(picture.height, picture.width)
    except ValueError as error:
        raise ReportError(
            "The saved report is damaged: its picture does not have the size that it states.",
            remedy="Replay the dump again: nandoctor replay DUMP --per-sample -o report.json.",
        ) from error


def as_element(image: bytes, kind: str, title: str) -> Markup:
    """Return an image of a MIME type as an element of a page."""
    data = base64.b64encode(image).decode()
    return Markup('<img src="data:image/{};base64,{}" alt="{}">').format(kind, data, title)
