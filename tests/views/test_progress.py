"""The bar of a replay, on a terminal and in a notebook, where the diagnosis stands above it until fixes are known."""

import io
import sys
from types import SimpleNamespace

import factory
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
def test_a_search_tells_its_runs_and_the_best_fix(most, shown):
    bar = progress.ReplayBar(Console(file=io.StringIO()))
    bar("fp32", 12, 12)
    bar.searched(14, most, "")
    assert "Fixes" in text_of(bar)
    assert shown in text_of(bar)
    bar.searched(14, most, "an eps of 1e-4 instead of 1e-8 in net.py:45")
    assert f"{shown}, best: an eps" in text_of(bar)
    assert len(text_of(bar)) <= 80


class Output:
    """A display of IPython that keeps what it was given."""

    def __init__(self):
        self.shown = []

    def display(self, data, *, raw, display_id):
        assert raw
        assert display_id
        return self

    def update(self, data, *, raw):
        self.shown.append(data)


@pytest.fixture
def output(monkeypatch):
    """A notebook as far as a replay can tell."""
    made = Output()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setitem(sys.modules, "IPython.display", made)
    monkeypatch.setattr(progress, "is_notebook", lambda: True)
    monkeypatch.setattr(progress, "_UPDATE_S", 0.0)
    return made


def test_a_notebook_shows_the_diagnosis_above_the_search(output):
    shown = progress.NotebookProgress()
    shown("fp32", 3, 12)
    shown.tell(factory.fixable())
    shown.searched(5, 200, "")
    shown.close()
    running, diagnosed, searching, ended = output.shown
    assert "3/12 layers" in running["text/plain"]
    assert "divides 0 by 0" in diagnosed["text/html"]
    assert "5 of at most 200 runs" in searching["text/plain"]
    assert ended == {"text/plain": ""}


def test_an_interrupt_in_a_notebook_gives_the_report_so_far(output, replay, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(progress.NotebookProgress, "searched", interrupt)
    monkeypatch.setattr(progress.NotebookProgress, "tell", lambda *_: None)
    report = replay(Overflowing, {"image": torch.ones(2, 4)})
    assert report.cause is not None
    assert any("interrupt" in note.lower() for note in report.search_notes)
    assert output.shown[-1] == {"text/plain": ""}
