"""What was not looked at, on traces made by hand."""

import pytest
from made_traces import INF, NAN, call, stats, trace

from nandoctor.diagnosis.verdict import find_gaps, judge_unfailing
from nandoctor.evidence.dump_summary import SavedFlags
from nandoctor.evidence.report import Reproduction

AGREES = Reproduction(grade="exact")
DIFFERS = Reproduction(grade="no-reference")
FINITE = trace(call("", 0, 1), output=(stats(1.0),))
OWN_LOSS = trace(call("", 0, 1), output=(stats(1.0, path="loss"),))
SECRET = trace(call("", 0, 1), output=(), unread=("rows (a generator)",))


@pytest.mark.parametrize(
    ("run", "flags", "reproduction", "has_loss", "said"),
    [
        (FINITE, SavedFlags(), AGREES, False, []),
        (FINITE, SavedFlags(loss=NAN), AGREES, True, []),
        (OWN_LOSS, SavedFlags(loss=NAN), AGREES, False, []),
        (FINITE, SavedFlags(gradients=True), AGREES, True, []),
        (FINITE, SavedFlags(loss=NAN), AGREES, False, ["The step's loss was NaN. The model's output is finite, so"]),
        (FINITE, SavedFlags(loss=-INF), DIFFERS, False, ["The step's loss was -Inf, and the loss is not in the file"]),
        (FINITE, SavedFlags(gradients=True), AGREES, False, ["gradients were non-finite"]),
        (FINITE, SavedFlags(gradients=True, num_ranks=2), AGREES, True, ["summed over 2 ranks"]),
        (FINITE, SavedFlags(here=False, rank=1, num_ranks=4), AGREES, True, ["rank 1 (of 4, counted from 0)"]),
        (SECRET, SavedFlags(), AGREES, True, ["cannot be inspected: rows (a generator)"]),
        (SECRET, SavedFlags(loss=NAN), AGREES, False, ["rows (a generator)", "loss was NaN"]),
    ],
)
def test_the_gaps_of_a_step(run, flags, reproduction, has_loss, said):
    gaps = tuple(find_gaps(run, flags, reproduction, has_loss=has_loss))
    assert len(gaps) == len(said)
    assert all(text in gap.text and gap.remedy for text, gap in zip(said, gaps, strict=True))


@pytest.mark.parametrize(
    ("verdict", "run", "flags", "has_loss", "expected"),
    [
        ("healthy", FINITE, SavedFlags(), False, "healthy"),
        ("healthy", FINITE, SavedFlags(loss=NAN), False, "cannot-tell"),
        ("healthy", FINITE, SavedFlags(loss=NAN), True, "not-reproduced"),
        ("healthy", FINITE, SavedFlags(gradients=True), True, "not-reproduced"),
        ("healthy", FINITE, SavedFlags(here=False), True, "cannot-tell"),
        ("not-reproduced", FINITE, SavedFlags(loss=NAN), False, "not-reproduced"),
        ("numerics", SECRET, SavedFlags(loss=NAN), False, "numerics"),
    ],
)
def test_nothing_found_is_healthy_only_if_all_was_seen(verdict, run, flags, has_loss, expected):
    gaps = tuple(find_gaps(run, flags, AGREES, has_loss=has_loss))
    assert judge_unfailing(verdict, gaps, flags) == expected
