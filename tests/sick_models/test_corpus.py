"""The corpus keeps its own promises: each case dies where, how and why it says, and its healthy twin lives.

In: the cases. Out: assertions, made without nandoctor's diagnosis; only its emulation of CUDA autocast is used.
"""

import inspect
import sys
from collections import Counter

import pytest
from one_test import for_each
from strangers import all_rows

from nandoctor.causes import registry
from sick_models import Case, all_cases, healthy_models
from sick_models.case import MECHANISMS
from sick_models.probing import distance, run

# What a recorder alone can see, the update by the optimizer, has its trainings in tests/capture.
CAUSES = {registry.code_of(cause) for cause in registry.CAUSES if cause.PHASES != ("update",)}
SHOWS_IN = {
    "forward": ("output",),
    "loss": ("loss",),
    "backward": ("gradients",),
    "optimizer": ("weights",),
    # Non-finite state or a non-finite batch comes to light wherever it is first read.
    "state": ("output", "loss", "gradients"),
    "input": ("output", "loss"),
}

CASES = all_cases()
every_case = for_each(CASES)

pytestmark = pytest.mark.slow


def assert_healthy(case: Case) -> None:
    autocast, fp32 = run(case, autocast=True), run(case, autocast=False)
    assert (autocast.first_nonfinite, fp32.first_nonfinite) == ("", "")
    assert distance(autocast, fp32) < 0.05


def test_each_mechanism_has_a_case_and_each_cause_has_two() -> None:
    causes = Counter(case.cause for case in CASES)
    assert {case.mechanism for case in CASES} == set(MECHANISMS.values())
    assert set(causes) == CAUSES
    causes.update(row.expect.cause for row in all_rows().values())
    assert min(causes[cause] for cause in CAUSES) >= 2
    assert {code for case in CASES for code in case.near_causes} <= CAUSES


def test_names_are_unique() -> None:
    names = [case.name for case in (*CASES, *healthy_models())]
    assert len(set(names)) == len(names)


@every_case
def test_dies_where_it_says_in_the_precisions_of_its_verdict(case: Case) -> None:
    autocast, fp32 = run(case, autocast=True), run(case, autocast=False)
    if case.verdict == "silent":
        assert autocast.first_nonfinite == ""
        assert distance(autocast, fp32) > 0.3
    else:
        assert autocast.first_nonfinite in SHOWS_IN[case.phase]
    if case.verdict in ("precision", "silent", "loss-scale"):
        assert fp32.first_nonfinite == ""
    elif case.verdict == "numerics":
        assert fp32.first_nonfinite in SHOWS_IN[case.phase]
    else:
        assert case.verdict == case.phase


@every_case
def test_twin_is_healthy_in_both_precisions(case: Case) -> None:
    twin = case.twin()
    assert twin.verdict == "healthy"
    assert_healthy(twin)


@pytest.mark.parametrize("case", healthy_models(), ids=lambda case: case.name)
def test_decoy_is_healthy_in_both_precisions(case: Case) -> None:
    assert_healthy(case)


@every_case
def test_line_stands_once_in_its_file(case: Case) -> None:
    if case.phase in ("state", "input", "optimizer"):
        assert case.line == ""
        return
    source = inspect.getsource(sys.modules[type(case.build()).__module__])
    lines = [line for line in source.splitlines() if case.line in line and not line.strip().startswith("line=")]
    assert len(lines) == 1
