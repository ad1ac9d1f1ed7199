"""The fixes of the sick models: each is diagnosed as what it is, and each that can be fixed has a verified fix."""

import pytest
from sick_models import all_cases
from sick_models.judging import diagnose, faults
from strangers.rows import assert_verified_passed

QUICK = {
    *("product/decoder-feed-forward", "input/microscope-counts", "eps/digital-silence", "ratio/no-organ"),
    *("weights/one-nan", "optimizer/unseen-words"),
}
"""One of each kind of fix: of a module, the input, an eps, a bound, the weights and the optimizer."""

UNFIXABLE = {"weights/one-nan"}
"""No code gives back what the weights have lost."""
WORKED_AROUND = {"form/gated-mask", "buffers/codebook", "function/swish"}
"""The formula has no value there, and no limit either, so that a finite step needs a value that somebody makes up. So
does a number in a hand-written backward."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in all_cases()],
)
def test_what_can_be_fixed_has_a_verified_fix(case, tmp_path):
    report = diagnose(case, tmp_path, fixes=True)
    assert faults(case, report) == []
    verified = [item for item in report.fixes if item.verified]
    assert bool(verified) == (case.verdict != "input" and case.name not in UNFIXABLE | WORKED_AROUND)
    assert any(item.workaround for item in report.fixes) >= (case.name in WORKED_AROUND)
    assert_verified_passed(report)
    assert [item.rank for item in report.fixes] == list(range(len(report.fixes)))


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.verdict == "precision"][::20], ids=lambda c: c.name
)
def test_a_healthy_twin_gets_no_prescription(case, tmp_path):
    assert diagnose(case.twin(), tmp_path, fixes=True).fixes == ()
