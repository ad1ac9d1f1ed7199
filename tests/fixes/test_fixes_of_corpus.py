"""The fixes of the sick models: each is diagnosed as what it is, and each that can be fixed has a verified fix."""

import pytest
from sick_models import all_cases
from sick_models.accepted import ACCEPTED
from sick_models.judging import diagnose, faults

QUICK = {
    *("product/decoder-feed-forward", "input/microscope-counts", "eps/relu-attention", "ratio/no-organ"),
    *("weights/embedding-row", "optimizer/unseen-words"),
}
"""One of each kind of fix: of a module, the input, an attribute, a bound, the weights and the optimizer."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in all_cases()],
)
def test_what_can_be_fixed_has_a_verified_fix(case, tmp_path):
    report = diagnose(case, tmp_path, fixes=True)
    assert faults(case, report) == []
    verified = [item for item in report.fixes if item.verified]
    accepted = ACCEPTED[case.name] or ""
    is_workaround = accepted.startswith("workaround")
    assert bool(verified) == bool(accepted and not is_workaround)
    assert any(item.workaround for item in report.fixes) >= is_workaround
    assert all(item.outcome.finite and item.title and (item.patch or item.settings) for item in verified)
    assert all(check.status != "failed" for item in verified for check in item.checks)
    assert [item.rank for item in report.fixes] == list(range(len(report.fixes)))
    if case.verdict in ("precision", "silent"):
        assert verified


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.verdict == "precision"][::20], ids=lambda c: c.name
)
def test_a_healthy_twin_gets_no_prescription(case, tmp_path):
    assert diagnose(case.twin(), tmp_path, fixes=True).fixes == ()
