"""The corpus of sick models through the public door: a dump file goes in, and the diagnosis that comes out is judged."""

from __future__ import annotations

import pytest
import torch
from sick_models import Case, all_cases, decoyed, healthy_models, renamed

import nandoctor

CASES = all_cases()
OPTIMIZER_STATE_UNREAD = pytest.mark.xfail(strict=True, reason="a dump's optimizer state is not read yet")

# The remark of std() on a single element is the very thing that a case is about.
pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")


def parametrised(cases, *, marks=True):
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, id=case.name, marks=OPTIMIZER_STATE_UNREAD if case.phase == "optimizer" and marks else ()
            )
            for case in cases
        ],
    )


def diagnose(case: Case, folder) -> nandoctor.Case:
    """The case's failing step saved to a file as a training script would, and replayed from there."""
    model = case.build()
    path = folder / "dump.pth"
    torch.save({"state_dict": model.state_dict(), **case.batch()}, path)
    return nandoctor.replay(
        path,
        model=case.build,
        call=case.call,
        loss=case.loss,
        loss_scale=case.loss_scale,
        mode="train" if case.train else "eval",
    )


def assert_right(case: Case, report) -> None:
    """Everything that the case knows about its illness, at once, so that a failure shows all that is wrong."""
    origin, cause = report.origin, report.cause
    assert origin is not None
    assert cause is not None
    assert (report.verdict, origin.phase, origin.module, origin.op or "") == (
        case.verdict,
        case.phase,
        case.module,
        case.op,
    )
    assert cause.code in case.causes
    # A custom Function's backward has no line of its own in the graph.
    if case.line and origin.source is not None:
        assert case.line in origin.source.text
    assert origin.source is not None or case.phase not in ("forward", "loss")


@parametrised(CASES)
def test_the_origin_and_its_cause_are_right(case, tmp_path):
    assert_right(case, diagnose(case, tmp_path).report)


@parametrised([renamed(case) for case in CASES])
def test_names_do_not_matter(case, tmp_path):
    assert_right(case, diagnose(case, tmp_path).report)


@parametrised([decoyed(case) for case in CASES])
def test_an_innocent_branch_beside_it_is_not_blamed(case, tmp_path):
    report = diagnose(case, tmp_path).report
    assert_right(case, report)
    assert all("loud" not in other.origin.module for other in report.also)


@parametrised([*(case.twin() for case in CASES), *healthy_models()], marks=False)
def test_the_healthy_are_called_healthy(case, tmp_path):
    report = diagnose(case, tmp_path).report
    assert report.verdict == "healthy", report.headline
    assert report.origin is None
