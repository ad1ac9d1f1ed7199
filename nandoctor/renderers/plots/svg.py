"""A figure as SVG inside a page.

It scales, has its text as text, and uses no name twice on the page.
"""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree as ET

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.text import Text

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"#([\w-]+)")
_READABLE_PX = 10.0
_FONTS = "DejaVu Sans, Verdana, Geneva, sans-serif"


def figure_svg(figure: Figure, *, prefix: str, title: str) -> Markup:
    """The drawing; ids that nothing refers to are dropped, the others begin with `prefix`.

    It is never so small that its letters cannot be read: a narrow page scrolls it.
    """
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(file.getvalue())
    for element in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(element)
    _rename(root, prefix)
    min_width = round(figure.get_figwidth() * 72 * _READABLE_PX / _smallest_text(figure))
    root.attrib |= {"role": "img", "aria-label": title, "width": "100%", "style": f"min-width: {min_width}px"}
    root.attrib.pop("height", None)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    return Markup(ET.tostring(root, encoding="unicode"))


def for_page_and_phone(wide: Markup, narrow: Markup) -> Markup:
    """Both drawings, of which the page shows the one that fits."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


def _smallest_text(figure: Figure) -> float:
    """The size of the smallest letters that are drawn, in points."""
    texts = (artist for artist in figure.findobj(Text) if artist.get_text() and artist.get_visible())
    return min((float(text.get_fontsize()) for text in texts), default=_READABLE_PX)


def _rename(root: ET.Element, prefix: str) -> None:
    """Give the page's only name to what is referred to, and none to the rest."""
    elements = list(root.iter())
    used = {name for element in elements for value in element.attrib.values() for name in _REFERENCE.findall(value)}
    for element in elements:
        name = element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key.endswith("href") or "url(#" in value:
                element.set(key, _REFERENCE.sub(rf"#{prefix}-\1", value) if not value.startswith("data:") else value)
        if name in used:
            element.set("id", f"{prefix}-{name}")
