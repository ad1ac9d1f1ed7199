"""The corpus of sick models through the public door: a dump file goes in, and the diagnosis that comes out is judged."""

from __future__ import annotations

import pytest
from sick_models import all_cases, decoyed, healthy_models, renamed
from sick_models.judging import diagnose, faults

CASES = all_cases()
OPTIMIZER_STATE_UNREAD = pytest.mark.xfail(strict=True, reason="a dump's optimizer state is not read yet")

# The remark of std() on a single element is the very thing that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")


def each(cases):
    unread = {True: OPTIMIZER_STATE_UNREAD, False: ()}
    params = [pytest.param(case, id=case.name, marks=unread[case.phase == "optimizer"]) for case in cases]
    return pytest.mark.parametrize("case", params)


@each(CASES)
def test_verdict_module_op_cause_and_line_are_right(case, tmp_path):
    assert faults(case, diagnose(case, tmp_path)) == []


@each(map(renamed, CASES))
def test_names_do_not_matter(case, tmp_path):
    assert faults(case, diagnose(case, tmp_path)) == []


@each(map(decoyed, CASES))
def test_an_innocent_branch_beside_it_is_not_blamed(case, tmp_path):
    report = diagnose(case, tmp_path)
    assert faults(case, report) == []
    assert all("loud" not in other.origin.module for other in report.also)


@pytest.mark.parametrize("case", [*(case.twin() for case in CASES), *healthy_models()], ids=lambda case: case.name)
def test_the_healthy_are_called_healthy(case, tmp_path):
    assert faults(case, diagnose(case, tmp_path)) == []
