"""The few shapes that reports and inspections share on a terminal.

In: labels, sentences and rich renderables. Out: renderables that fit the width and the encoding of any console.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nandoctor.text import printable

_PLAINER = str.maketrans({"█": "#", "░": ".", "…": "~"})


class Encodable:
    """A renderable whose letters the console's encoding can write: a report piped on Windows goes out in cp1252.

    Letters are replaced one by one, after the layout, so that columns stay aligned.
    """

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if not options.ascii_only else _plainer(segment, options.encoding)


def _plainer(segment: Segment, encoding: str) -> Segment:
    text = segment.text.translate(_PLAINER).encode(encoding, "replace").decode(encoding)
    return Segment(text, segment.style, segment.control)


def literal(text: str, style: str = "") -> Text:
    """Text shown as it is: no markup, and nothing in it can move the cursor or start a new line."""
    return Text(printable(text), style=style)


def labelled(lines: Iterable[tuple[str, str]]) -> Table:
    """Sentences behind their labels; a long one goes on below itself, not below its label."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(literal(label, "dim"), literal(text))
    return grid
