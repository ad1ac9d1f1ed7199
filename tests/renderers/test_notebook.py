"""How a notebook shows the parts of a case."""

from __future__ import annotations

import factory
import pytest
from IPython.core.interactiveshell import InteractiveShell
from test_notebook_card import Balanced

from nandoctor.diagnosis.compare_reports import compare_reports
from nandoctor.renderers import notebook
from nandoctor.renderers.facts import describe_tensor
from nandoctor.renderers.notebook import record_html, show_records

FIXABLE = factory.fixable()


@pytest.fixture
def shell(monkeypatch):
    shell = InteractiveShell()
    monkeypatch.setattr(notebook, "_find_shell", lambda: shell)
    show_records()
    return shell


def test_records_are_tables_and_tensors_lines(shell):
    data, _ = shell.display_formatter.format(FIXABLE.origin)
    assert data["text/html"].startswith("<table")
    data, _ = shell.display_formatter.format(FIXABLE.origin.inputs[0])
    assert data == {"text/plain": "self: fp16 [4, 16, 32, 32], -6.8 to 13.6, median magnitude 1.13"}


def test_a_record_says_what_it_has():
    text = Balanced(record_html(FIXABLE.origin)).text
    assert "div in encoder.blocks.2.attention: NaN in 288 of 65,536" in text
    assert "net.py:45: return x / torch.sqrt(variance + 1e-8)" in text
    assert "would be" not in text
    assert "grid" not in text


@pytest.mark.parametrize(
    "record",
    [FIXABLE.first_nonfinite, FIXABLE.cause, FIXABLE.fixes[0], compare_reports(FIXABLE, factory.healthy())],
    ids=lambda record: type(record).__name__,
)
def test_every_record_is_well_formed(record):
    assert len(Balanced(record_html(record)).text) >= 6


def test_records_have_a_line_where_there_is_no_html(shell):
    records = (FIXABLE.origin, FIXABLE.cause, FIXABLE.first_nonfinite, FIXABLE.fixes[0])
    lines = [shell.display_formatter.format(record)[0]["text/plain"] for record in records]
    assert lines[0] == "div in encoder.blocks.2.attention: NaN in 288 of 65,536"
    assert lines[1].startswith("eps-underflow: 1e-8 rounds to zero")
    assert lines[2].startswith("encoder.blocks.2.attention (MultiheadAttention): fp16 [4, 16, 32, 32]")
    assert lines[3] == "An eps that fp16 holds at net.py:45"


def test_nothing_happens_outside_of_ipython(monkeypatch):
    monkeypatch.setattr(notebook, "_find_shell", lambda: None)
    show_records()


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (factory.tensor(2.0, shape=(3,)), "fp16 [3], -1 to 2, median magnitude 0.167"),
        (
            factory.tensor(None, nonfinite=factory.counts(5), shape=(4, 2)),
            "fp16 [4, 2], no finite value, NaN in 5 of 8 (index 2 of dimension 0)",
        ),
        (
            factory.tensor(1.0, nonfinite=factory.counts(8, samples=(0, 1)), shape=(2, 4)),
            "fp16 [2, 4], -0.5 to 1, median magnitude 0.0833, NaN in 8 of 8",
        ),
    ],
)
def test_a_tensor_in_one_line(stats, text):
    assert describe_tensor(stats) == text
