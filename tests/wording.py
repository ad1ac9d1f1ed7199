"""Compare printed texts across machines, without the numbers that depend on the processor's order of summation."""

import io
import re

from rich.console import Console

from nandoctor.views.terminal import print_document

NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(e[+-]?\d+)?")
AGREEMENT = re.compile(
    r"(?<=non-finite, )all others (identical|within # % of the largest saved value)"
    r"|(?<=finite in both, )(and identical|within # % of the largest saved value)"
)
"""A replay that is bit-identical on one machine may agree only within rounding on another, and vice versa."""


def words(text: str) -> list[str]:
    """Return the words of `text` with # for each number, and one word for both agreements."""
    plainer = " ".join(NUMBER.sub("#", text).split())
    return AGREEMENT.sub("AGREES", plainer).split()


def plain_text(blocks, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        print_document(blocks, console)
    return captured.get()
