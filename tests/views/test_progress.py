"""The bar of a replay, and what an interrupt leaves."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny_models import Overflowing

from nandoctor.views import progress


def text_of(bar):
    console = Console(file=io.StringIO(), width=80)
    console.print(bar.display.get_renderable())
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("most", "shown"), [(200, "14 of at most 200 runs"), (None, "14 runs"), (float("inf"), "14 runs")]
)
def test_a_search_tells_its_runs(most, shown):
    bar = progress.ReplayDisplay()
    bar("fp32", 12, 12)
    bar.searched(14, most)
    assert "Fixes" in text_of(bar)
    assert shown in text_of(bar)
    assert len(text_of(bar)) <= 80


def test_an_interrupt_in_a_notebook_gives_the_report_so_far(replay, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress.ReplayDisplay, "searched", interrupt)
    monkeypatch.setattr(progress.ReplayDisplay, "tell", lambda *_: None)
    report = replay(Overflowing, {"image": torch.ones(2, 4)})
    assert report.cause is not None
    assert any("interrupt" in note.lower() for note in report.search_notes)
