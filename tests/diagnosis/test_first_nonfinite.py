"""Where a non-finite value first came to light, on traces made by hand."""

from __future__ import annotations

import dataclasses

import pytest
from made_traces import GOOD, INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.origin import find_nonfinite_places, needs_counts
from nandoctor.evidence.formats import FP16

NONFINITE = stats(NAN, 1.0)
MASK = stats(0.0, -INF)
HEALTHY = reference(call("", 0, 5), call("first", 1, 2), call("last", 3, 4))


def find_first(sick, healthy):
    """The first non-finite place, None where there is none."""
    return next(iter(find_nonfinite_places(sick, healthy)), None)


def place(nonfinite_place):
    """What a non-finite place says: what, whose, seen where."""
    owner = nonfinite_place.owner.module if nonfinite_place.owner else None
    return nonfinite_place.where, owner, nonfinite_place.seen_in.module if nonfinite_place.seen_in else None


def without_counts(stats_):
    return dataclasses.replace(stats_, counts=None)


def test_nothing_is_found_where_everything_is_finite():
    assert find_first(HEALTHY, HEALTHY) is None


def test_the_output_of_a_module():
    sick = trace(
        call("", 0, 5, outputs=(NONFINITE,)),
        call("first", 1, 2, outputs=(GOOD, NONFINITE)),
        call("last", 3, 4, inputs=(NONFINITE,)),
    )
    nonfinite_place = find_first(sick, HEALTHY)
    assert place(nonfinite_place) == ("output", "first", None)
    assert nonfinite_place.value is NONFINITE


def test_an_inner_module_returns_before_the_one_around_it():
    sick = trace(
        call("", 0, 5, outputs=(NONFINITE,)),
        call("a", 1, 4, outputs=(NONFINITE,)),
        call("a.b", 2, 3, outputs=(NONFINITE,)),
    )
    assert place(find_first(sick, HEALTHY)) == ("output", "a.b", None)


def test_a_value_between_modules_belongs_to_the_outer_forward():
    sick = trace(
        call("", 0, 7), call("a", 1, 6), call("a.b", 2, 3), call("a.c", 4, 5, inputs=(NONFINITE,), outputs=(NONFINITE,))
    )
    assert place(find_first(sick, HEALTHY)) == ("between", "a", "a.c")


def test_a_value_made_in_the_root_before_its_first_module():
    sick = trace(call("", 0, 3), call("a", 1, 2, inputs=(NONFINITE,)))
    assert place(find_first(sick, HEALTHY)) == ("between", "", "a")


def test_a_value_after_the_last_module_belongs_to_its_caller():
    sick = trace(call("", 0, 5, outputs=(NONFINITE,)), call("a", 1, 4, outputs=(NONFINITE,)), call("a.b", 2, 3))
    assert place(find_first(sick, HEALTHY)) == ("output", "a", None)


def test_the_call_number_counts():
    sick = trace(
        call("", 0, 5), call("layer", 1, 2), call("layer", 3, 4, number=1, outputs=(NONFINITE,)), output=(NONFINITE,)
    )
    assert find_first(sick, HEALTHY).owner.key == ("layer", 1)


def test_the_parent_of_a_repeated_call_is_the_call_around_it():
    sick = trace(
        call("", 0, 9),
        call("a", 1, 4),
        call("a.b", 2, 3),
        call("a", 5, 8, number=1),
        call("a.b", 6, 7, number=1, inputs=(NONFINITE,)),
    )
    assert find_first(sick, HEALTHY).owner.key == ("a", 1)


def test_a_nonfinite_batch_comes_before_everything():
    sick = trace(
        call("", 0, 1, inputs=(NONFINITE,), outputs=(NONFINITE,)), batch=(GOOD, NONFINITE), output=(NONFINITE,)
    )
    assert place(find_first(sick, reference(output=(NONFINITE,)))) == ("batch", None, None)


def test_a_nonfinite_loss_comes_after_everything():
    assert place(find_first(trace(call("", 0, 1), loss=NONFINITE), HEALTHY)) == ("loss", None, None)


def test_what_never_returned_shows_only_its_inputs():
    sick = trace(
        call("", 0, None), call("a", 1, 2, outputs=(NONFINITE,)), call("b", 3, None, inputs=(NONFINITE,)), raised="stop"
    )
    assert place(find_first(sick, HEALTHY)) == ("output", "a", None)


MASKED = (
    call("", 0, 5),
    call("bias", 1, 2, outputs=(MASK,)),
    call("softmax", 3, 4, inputs=(MASK,)),
)


def test_a_mask_that_fp32_has_too_and_survives_is_meant():
    assert find_first(trace(*MASKED), reference(*MASKED)) is None


def test_the_disease_behind_a_meant_mask_is_found():
    sick = trace(*MASKED[:2], call("softmax", 3, 4, inputs=(MASK,), outputs=(NONFINITE,)), output=(NONFINITE,))
    assert place(find_first(sick, reference(*MASKED))) == ("output", "softmax", None)


def test_a_mask_is_not_meant_where_fp32_fails_as_well():
    sick = trace(*MASKED[:2], call("softmax", 3, 4, inputs=(MASK,), outputs=(NONFINITE,)), output=(NONFINITE,))
    failing = reference(*sick.calls, output=(NONFINITE,))
    assert place(find_first(sick, failing)) == ("output", "bias", None)


def test_a_nan_where_fp32_has_a_mask_is_not_meant():
    sick = trace(
        call("", 0, 5), call("bias", 1, 2, outputs=(stats(0.0, NAN),)), call("softmax", 3, 4, inputs=(NONFINITE,))
    )
    assert place(find_first(sick, reference(*MASKED))) == ("output", "bias", None)


def test_uncounted_values_at_the_place_of_a_mask_are_intended():
    sick = trace(call("", 0, 3), call("bias", 1, 2, outputs=(without_counts(stats(0.0, NAN)),)))
    assert find_first(sick, reference(*MASKED)) is None


def test_another_tensor_of_the_same_call_is_not_meant():
    sick = trace(call("", 0, 5), call("bias", 1, 2, outputs=(MASK, stats(-INF, path="scores"))))
    assert find_first(sick, reference(*MASKED)).value.path == "scores"


@pytest.mark.parametrize(
    ("tensor", "asks"),
    [
        (without_counts(NONFINITE), True),
        (without_counts(stats(1e-7, 1.0)), True),
        (NONFINITE, False),
        (stats(1.0, 2.0), False),
    ],
)
def test_counts_are_requested_where_there_are_none(tensor, asks):
    assert needs_counts(trace(call("", 0, 3), call("layer", 1, 2, inputs=(tensor,))), FP16) is asks


def test_later_places_follow_in_the_order_of_execution():
    sick = trace(
        call("", 0, 3, outputs=(NONFINITE,)), call("a", 1, 2, inputs=(NONFINITE,), outputs=(NONFINITE,)), loss=NONFINITE
    )
    expected = [("between", "", "a"), ("output", "a", None), ("output", "", None), ("loss", None, None)]
    assert [place(nonfinite_place) for nonfinite_place in find_nonfinite_places(sick, HEALTHY)] == expected
