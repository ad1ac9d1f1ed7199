"""Writes docs/terminal.svg: what `nandoctor replay sample_dumps/unet_blank_tile.pth` prints, down to the fix.

In: the sample. Out: an SVG made by rich. tests/test_readme.py compares it with what is printed today.
"""

import io
from pathlib import Path

from rich.console import Console

import nandoctor
from nandoctor.views.report import report_document
from nandoctor.views.terminal import print_document

SAMPLE = "sample_dumps/unet_blank_tile.pth"
WIDTH = 84


def draw(report):
    """Return the first screen of a report as the text of an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    headline, answer, fix, *_ = report_document(report)
    print_document([headline, answer, fix], console)
    return console.export_svg(title=f"nandoctor replay {SAMPLE}", unique_id="nandoctor")


if __name__ == "__main__":
    target = Path(__file__).with_name("terminal.svg")
    target.write_text(draw(nandoctor.replay(SAMPLE).report), encoding="utf-8")
