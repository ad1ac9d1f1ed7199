"""Two reports side by side, and how that is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import factory
import pytest
from surfaces import terminal

from nandoctor.diagnosis.compare_reports import compare_reports
from nandoctor.evidence.codec import from_plain
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.report_diff import Comparison
from nandoctor.views.jsonfile import dumps


def test_a_report_does_not_differ_from_itself():
    comparison = compare_reports(factory.fixable(), factory.fixable())
    assert (comparison.outcome, comparison.changes, comparison.layers) == ("same-failure", (), ())
    assert comparison.headline == "The same failure in both: eps-underflow."


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (factory.precision, factory.healthy, "fixed"),
        (factory.healthy, factory.precision, "broken"),
        (factory.precision, lambda: factory.precision(nonfinite_from=3), "moved"),
        (factory.precision, factory.numerics, "moved"),
        (factory.healthy, factory.not_reproduced, "both-finite"),
        (factory.weights_only, factory.weights_only, "same-failure"),
    ],
)
def test_outcomes(before, after, outcome):
    assert compare_reports(before(), after()).outcome == outcome


def test_a_fix_shows_in_verdict_place_and_layers():
    comparison = compare_reports(factory.precision(), factory.healthy())
    changes = {change.name: (change.before, change.after) for change in comparison.changes}
    assert changes["verdict"] == ("precision", "healthy")
    assert changes["first non-finite"] == ("encoder.blocks.2.attention", None)
    assert changes["samples"] == ("2", None)
    first = comparison.layers[0]
    assert (first.place.label, first.finite_before, first.finite_after) == ("encoder.blocks.2.attention", False, True)
    assert comparison.num_shared == 26
    row = next(line.split() for line in terminal(comparison).splitlines() if line.startswith(first.place.label))
    assert row[3] == "-"  # the largest finite value beside NaN is no magnitude to compare with
    assert all(layer.finite_before != layer.finite_after for layer in comparison.layers)


def test_layers_are_told_by_how_much_they_grew():
    before, after = (factory.report(factory.network(20, growth=growth)) for growth in (1.0, 1.1))
    comparison = compare_reports(before, after)
    assert comparison.layers[0].growth == pytest.approx(1.1**19)
    assert all(layer.growth >= 2**0.5 for layer in comparison.layers)


def test_layers_that_changed_alike_stay_in_order_of_execution():
    before, after = factory.precision(), factory.report(factory.network(20, growth=1.0 + 1e-6))
    healed = [layer for layer in compare_reports(before, after).layers if not layer.finite_before]
    shared = {layer.place for layer in healed}
    assert len(healed) > 1
    assert [layer.place for layer in healed] == [
        row.place for row in after.runs.autocast.modules if row.place in shared
    ]


def test_another_format_does_not_change_the_ranges():
    comparison = compare_reports(factory.healthy(), replace(factory.report(factory.network(20, low=BF16))))
    assert comparison.layers == ()
    assert {change.name for change in comparison.changes} == {"format"}


def test_json_comes_back_as_the_comparison():
    comparison = compare_reports(factory.fixable(), factory.healthy())
    data = json.loads(dumps(comparison))
    assert data["schema"] == "nandoctor.comparison/3"
    assert from_plain(Comparison, data) == comparison


def test_a_difference_fits_one_screen():
    words = terminal(compare_reports(factory.precision(), factory.not_reproduced()))
    assert "reproduces the saved output -> finite" in words
    text = terminal(compare_reports(factory.precision(400, nonfinite_from=250), factory.healthy(300)))
    assert len(text.splitlines()) <= 45
    assert "Rows 1 to 20 of " in text
    same = terminal(compare_reports(factory.healthy(), factory.healthy()))
    assert "No call changed by a factor of 1.4 or more (26 calls that both made)." in same
