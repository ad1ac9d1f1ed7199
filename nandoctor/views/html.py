"""Draw a document as HTML: a self-contained page without network or framework, or a fragment for a notebook's cell."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import cache

import jinja2
from markupsafe import Markup
from markupsafe import escape as escape_html

from nandoctor.errors import NanDoctorError
from nandoctor.text import diff_kind, in_python, printable, printable_code, split_code
from nandoctor.views.blocks import Block, Plot, excerpt_lines
from nandoctor.views.markdown import draw_markdown


def page_of(document: Iterable[Block]) -> str:
    """Return the page of a report's or a triage's document."""
    blocks = [*document]
    return _environment().get_template("page.html.j2").render(blocks=blocks, markdown=draw_markdown(blocks))


def card_of(document: Iterable[Block]) -> str:
    """Return one `<div>` for a notebook's cell, without scripts or external files, in the colours of its page."""
    return _environment().get_template("card.html.j2").render(blocks=[*document])


def _draw_plot(plot: Plot) -> Markup | None:
    """Return the drawing; None if the report does not have the numbers for it."""
    from nandoctor.views.ranges import draw_ranges, image_of  # noqa: PLC0415  (imports matplotlib)

    try:
        figure = draw_ranges(plot.report)
    except NanDoctorError:
        return None
    data = base64.b64encode(image_of(figure, "svg")).decode()
    return Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">').format(
        data, " ".join(figure.get_suptitle().split())
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nandoctor.views"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        with_code=with_code, in_python=in_python, diff_kind=diff_kind, excerpt_lines=excerpt_lines
    )
    environment.filters["code_line"] = lambda line: escape_html(printable_code(line))  # to be copied, with its tabs
    environment.filters["short"] = lambda title: re.split("[,:]", title)[0]
    environment.filters["slug"] = lambda title: "h-" + re.sub(r"\W+", "-", title.lower())
    environment.globals.update(kind_of=lambda block: type(block).__name__, draw_plot=_draw_plot)
    return environment


def with_code(text: str) -> Markup:
    """Return an escaped sentence with its code in `<code>` elements."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if is_code else escape_html(part)
        for part, is_code in split_code(printable(text))
    )
