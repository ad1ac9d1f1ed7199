"""Two runs side by side: rows, headroom and relative error."""

import math

import pytest
from made_traces import INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.run_summary import align, relative_error
from nandoctor.evidence.formats import BF16, FP16


def test_rows_are_in_order_of_return_and_unfinished_ones_last():
    run = trace(call("", 0, None), call("a", 1, 4), call("a.b", 2, 3), call("c", 5, None), raised="stop")
    assert [row.place.module for row in align(run, reference(), FP16)] == ["a.b", "a", "", "c"]


def test_headroom_is_of_the_largest_output_in_the_low_format():
    run = trace(call("a", 0, 1, outputs=(stats(1.0), stats(-65504.0 / 4))), call("b", 2, 3, outputs=(stats(NAN),)))
    a, b = align(run, reference(), FP16)
    assert a.headroom_bits == pytest.approx(2.0)
    assert b.headroom_bits is None
    assert align(run, reference(), BF16)[0].headroom_bits > 100


@pytest.mark.parametrize(
    ("values", "others", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 9.0], [3.0, 4.0], 1.0),
        ([NAN, 4.0], [3.0, 2.0], 1.0),
        ([1.0, INF], [2.0, INF], 0.5),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([NAN], [1.0], None),
        ([3e38], [1e38], 2.0),
        ([], [], None),
    ],
)
def test_the_relative_error_is_over_what_is_finite_in_both(values, others, expected):
    assert relative_error((stats(*values),), (stats(*others),)) == pytest.approx(expected)
