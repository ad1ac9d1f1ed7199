"""Fill in the templates of pages and of Markdown; every string is made printable and escaped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup
from markupsafe import escape as escape_html

from nandoctor.renderers.facts import list_operands
from nandoctor.text import (
    bits_text,
    byte_size,
    diff_kind,
    number,
    plural,
    printable,
    printable_code,
    shape_text,
    split_code,
)


def render(template: str, *, escape: Callable[[str], str] = printable, **values: Any) -> str:
    """Fill in a template of `templates/`; strings that `escape` does not return as Markup are escaped for HTML."""
    return _environment(escape).get_template(template).render(**values)


@cache
def _environment(escape: Callable[[str], str]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nandoctor.renderers"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        number, bits_text, byte_size, plural, shape_text, list_operands,
        with_code, diff_kind, code_line,
    )  # fmt: skip
    environment.filters.update({function.__name__: function for function in filters})
    return environment


def with_code(text: str) -> Markup:
    """Return an escaped sentence with its code in `<code>` elements."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if is_code else escape_html(part)
        for part, is_code in split_code(printable(text))
    )


def code_line(line: str) -> Markup:
    """Return an escaped line of code to be copied, with its tabs."""
    return escape_html(printable_code(line))
