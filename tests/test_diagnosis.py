"""The corpus of sick models through the public door: a dump file goes in, and the diagnosis is judged."""

import pytest
from sick_models import all_cases, decoyed, healthy_models, renamed
from sick_models.judging import diagnose, faults

CASES = all_cases()


def each(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


QUICK = {*{case.mechanism: case.name for case in CASES}.values(), *{case.cause: case.name for case in CASES}.values()}
"""A case of every mechanism, and one of every cause."""


@each(case for case in CASES if case.name in QUICK)  # of all the others, with their fixes: test_fixes_of_corpus.py
def test_verdict_module_op_cause_and_line_are_right(case, tmp_path):
    assert faults(case, diagnose(case, tmp_path)) == []


@pytest.mark.slow
@each(decoyed(renamed(case)) for case in CASES)
def test_neither_names_nor_an_innocent_branch_matter(case, tmp_path):
    report = diagnose(case, tmp_path)
    assert faults(case, report) == []
    assert all("loud" not in other.origin.place.module for other in report.also)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case.twin(), id=case.name, marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, id=case.name) for case in healthy_models()),
    ],
)
def test_the_healthy_are_called_healthy(case, tmp_path):
    assert faults(case, diagnose(case, tmp_path)) == []
