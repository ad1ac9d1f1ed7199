"""The cures of the sick models: each precision case has a verified one, and the first is the smallest known."""

import pytest
from sick_models import all_cases
from sick_models.accepted import ACCEPTED
from sick_models.judging import diagnose

from nandoctor.evidence.edits import (
    KeepModule,
    KeepSamples,
    ResetBuffers,
    SetArgument,
    SetAttribute,
    SetLossScale,
    SetOptimizerEps,
    Together,
)


def describe(edit):
    """An edit's kind and place, as the table of accepted cures writes them."""
    if isinstance(edit, Together):
        return " + ".join(map(describe, edit.edits))
    return f"{edit.kind} {_place(edit)}"


def _place(edit):  # noqa: PLR0911
    site = next((getattr(edit, name) for name in ("site", "log", "product") if hasattr(edit, name)), None)
    match edit:
        case KeepModule(children=False):
            return f"{edit.module} (own ops)".strip()
        case SetAttribute():
            return f"{edit.type}.{edit.name} = {edit.value:g}"
        case SetArgument():
            return f"{edit.was:g} -> {edit.value}"
        case SetLossScale() | SetOptimizerEps():
            return f"{edit.value:g}"
        case ResetBuffers():
            return " ".join(edit.names)
        case KeepSamples():
            return str(edit.samples)
        case KeepModule():
            return edit.module
    return site.source.text if site.source else site.module


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_first_cure_is_the_smallest_known(case, tmp_path):
    report = diagnose(case, tmp_path, fixes=True)
    verified = [item for item in report.fixes if item.verified]
    assert (describe(verified[0].edit) if verified else None) == ACCEPTED[case.name]
    assert all(item.outcome.finite and item.patch and item.title for item in verified)
    assert [item.rank for item in report.fixes] == list(range(len(report.fixes)))
    if case.verdict in ("precision", "silent"):
        assert verified


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.verdict == "precision"][::4], ids=lambda c: c.name
)
def test_a_healthy_twin_gets_no_prescription(case, tmp_path):
    assert diagnose(case.twin(), tmp_path, fixes=True).fixes == ()
