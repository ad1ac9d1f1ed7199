"""Where a non-finite value first came to light, on traces made by hand."""

import dataclasses

import pytest
from made_traces import GOOD, INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.origin import find_nonfinite_places, needs_counts


def without_counts(stats_):
    return dataclasses.replace(stats_, counts=None)


NONFINITE = stats(NAN, 1.0)
MADE, SEEN = {"outputs": (NONFINITE,)}, {"inputs": (NONFINITE,)}
MASK = stats(0.0, -INF)
HEALTHY = reference(call("", 0, 5), call("first", 1, 2), call("last", 3, 4))
MASKED = (call("", 0, 5), call("bias", 1, 2, outputs=(MASK,)), call("softmax", 3, 4, inputs=(MASK,)))
BEHIND_MASK = trace(*MASKED[:2], call("softmax", 3, 4, inputs=(MASK,), outputs=(NONFINITE,)), output=(NONFINITE,))

PLACES = {
    "nothing": (HEALTHY, HEALTHY, None),
    "the root before its first module": (
        trace(call("", 0, 3), call("a", 1, 2, **SEEN)),
        HEALTHY,
        ("between", "", "a"),
    ),
    "after the last module, of its caller": (
        trace(call("", 0, 5, **MADE), call("a", 1, 4, **MADE), call("a.b", 2, 3)),
        HEALTHY,
        ("output", "a", None),
    ),
    "the batch, before everything": (
        trace(call("", 0, 1, **SEEN, **MADE), batch=(GOOD, NONFINITE), output=(NONFINITE,)),
        reference(output=(NONFINITE,)),
        ("batch", "", None),
    ),
    "the loss, after everything": (trace(call("", 0, 1), loss=NONFINITE), HEALTHY, ("loss", "<loss>", None)),
    "what never returned shows only its inputs": (
        trace(call("", 0, None), call("a", 1, 2, **MADE), call("b", 3, None, **SEEN), raised="stop"),
        HEALTHY,
        ("output", "a", None),
    ),
    "a mask that fp32 has too and survives is meant": (trace(*MASKED), reference(*MASKED), None),
    "the disease behind a meant mask": (BEHIND_MASK, reference(*MASKED), ("output", "softmax", None)),
    "a mask is not meant where fp32 fails as well": (
        BEHIND_MASK,
        reference(*BEHIND_MASK.calls, output=(NONFINITE,)),
        ("output", "bias", None),
    ),
    "a nan where fp32 has a mask is not meant": (
        trace(call("", 0, 5), call("bias", 1, 2, outputs=(stats(0.0, NAN),)), call("softmax", 3, 4, **SEEN)),
        reference(*MASKED),
        ("output", "bias", None),
    ),
    "uncounted values at the place of a mask are intended": (
        trace(call("", 0, 3), call("bias", 1, 2, outputs=(without_counts(stats(0.0, NAN)),))),
        reference(*MASKED),
        None,
    ),
}


def place(found):
    """What a non-finite place says: what, whose, seen where."""
    return found.where, found.place.module, found.seen_in and found.seen_in.module


def find_first(sick, healthy=HEALTHY):
    """The first non-finite place, None where there is none."""
    return next(iter(find_nonfinite_places(sick, healthy)), None)


@pytest.mark.parametrize("kind", PLACES)
def test_the_first_place(kind):
    sick, healthy, expected = PLACES[kind]
    found = find_first(sick, healthy)
    assert (found and place(found)) == expected
    assert found is None or found.value is not GOOD


@pytest.mark.parametrize(
    ("tensor", "asks"), [(without_counts(NONFINITE), True), (NONFINITE, False), (stats(1.0, 2.0), False)]
)
def test_counts_are_requested_where_there_are_none(tensor, asks):
    assert needs_counts(trace(call("", 0, 3), call("layer", 1, 2, inputs=(tensor,)))) is asks
