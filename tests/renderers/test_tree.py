"""The layers as a tree."""

from __future__ import annotations

from dataclasses import replace

import factory

from nandoctor.renderers import table
from nandoctor.renderers.table import make_tree


def labels(rows):
    return [row.cells.layer for row in rows]


def test_parents_stand_before_what_they_hold():
    rows = make_tree(factory.precision()).rows
    assert labels(rows)[:7] == [
        "(UNet)", "encoder.blocks.0", "encoder.blocks.0.norm", "encoder.blocks.0.attention",
        "encoder.blocks.0.project", "encoder.blocks.0.mlp", "encoder.blocks.1",
    ]  # fmt: skip
    assert [row.depth for row in rows[:3]] == [0, 1, 2]
    assert [(row.path, row.name) for row in rows[:3]] == [
        ("", "(UNet)"),
        ("", "encoder.blocks.0"),
        ("encoder.blocks.0.", "norm"),
    ]
    assert all(row.parent is None or row.parent < place for place, row in enumerate(rows))
    assert all(row.shown and not row.folded for row in rows)


def test_a_large_model_is_folded_but_for_its_nonfinite_layer():
    rows = make_tree(factory.precision(400, nonfinite_from=250)).rows
    shown = [row for row in rows if row.shown]
    assert len(rows) == 501
    assert len(shown) == 1 + 100 + 4
    first = next(row for row in rows if row.cells.first_nonfinite)
    assert first.shown
    assert first.cells.layer == "encoder.blocks.62.project"


def test_calls_of_one_module_stand_together():
    made = factory.healthy(4)
    rows = made.runs.autocast.modules
    again = (*rows, factory.put(rows[0], call=1))
    runs = replace(made.runs, autocast=replace(made.runs.autocast, modules=again))
    assert labels(make_tree(replace(made, runs=runs)).rows)[2:4] == [
        "encoder.blocks.0.norm",
        "encoder.blocks.0.norm (2nd call)",
    ]


def test_of_very_large_models_rows_near_the_nonfinite_are_kept(monkeypatch):
    monkeypatch.setattr(table, "MAX_ROWS", 50)
    made = make_tree(factory.precision(400, nonfinite_from=250))
    assert (len(made.rows), made.num_calls) == (50, 501)
    assert any(row.cells.first_nonfinite for row in made.rows)


def test_nothing_was_run():
    assert make_tree(factory.weights_only()).rows == ()


def test_names_are_printable():
    made = factory.precision()
    rows = tuple(factory.put(row, module="a\x1b.b\n") for row in made.runs.autocast.modules[:1])
    runs = replace(made.runs, autocast=replace(made.runs.autocast, modules=rows))
    assert r"a\x1b.b\n" in labels(make_tree(replace(made, runs=runs)).rows)
