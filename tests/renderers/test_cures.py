"""Cures and trials in sentences."""

from __future__ import annotations

from dataclasses import replace

import factory
import pytest

from nandoctor.evidence.formats import FP16
from nandoctor.evidence.report import EpsUse, Island, IslandSearch, TrialOutcome
from nandoctor.renderers.cures import describe_eps, describe_islands, describe_outcome, list_cures, tell_cures


def facts(report):
    return [(fact.label, fact.text) for fact in tell_cures(report)]


def test_nothing_was_tried_and_nothing_is_said():
    assert facts(factory.precision()) == []
    assert list_cures(factory.precision()) == ()


def test_the_first_cure_is_told_in_full_and_the_others_counted():
    assert facts(factory.cured())[:4] == [
        ("cure", "An eps that fp16 holds at net.py:45: tried, finite, within 0.062 % of fp32"),
        ("patch", "- return x / torch.sqrt(variance + 1e-8)"),
        ("", "+ return x / torch.sqrt(variance + 1e-5)"),
        (
            "or",
            "encoder.blocks.2.attention in fp32: finite, within 0.062 % of fp32; 1 more in the report (-o report.html)",
        ),
    ]


def test_a_lost_constant_is_told_where_it_is_not_the_cause():
    assert "eps" not in dict(facts(factory.cured()))
    other = replace(factory.cured(), cause=replace(factory.cured().cause, code="matmul-overflow"))
    assert dict(facts(other))["eps"].startswith("encoder.blocks.2.attention.add.other = 1e-08 is zero in fp16")


def test_trials_tell_what_is_finite_and_what_is_not():
    assert dict(facts(factory.cured()))["trials"] == "finite with bf16 and samples without 2; still fails with eval"


def test_a_trial_that_is_finite_and_far_from_fp32_is_not_told_among_the_sound():
    made = factory.cured()
    far = replace(made.counterfactuals[0], setting="fp16", outcome=TrialOutcome(finite=True, max_rel_err=1.2))
    told = dict(facts(replace(made, counterfactuals=(far, *made.counterfactuals))))["trials"]
    assert told.endswith("; finite and far from fp32 with fp16; still fails with eval")


def test_what_did_not_cure_comes_last_and_says_so():
    cures = list_cures(factory.cured())
    assert [cure.verified for cure in cures] == [True, True, True, False]
    failed = replace(factory.cured(), prescriptions=factory.cured().prescriptions[-1:])
    assert facts(failed)[0] == ("cure", "none of 1 tried held: Clamp what add returns")


def test_a_long_patch_is_cut_on_the_terminal_and_whole_in_the_report():
    made = factory.cured()
    long = replace(made.prescriptions[0], patch="\n".join(f"+ line {i}" for i in range(30)))
    made = replace(made, prescriptions=(long,))
    lines = [text for label, text in facts(made) if label in ("patch", "")]
    assert (len(lines), lines[-1]) == (13, "... 18 more lines in the report (-o report.html)")
    assert len(list_cures(made)[0].patch) == 30


def test_a_patch_cannot_move_the_cursor():
    made = factory.cured()
    hostile = replace(made.prescriptions[0], title="\x1b[2J", patch="\tx\x1b[2J\r\ny\u202e")
    cure = list_cures(replace(made, prescriptions=(hostile,)))[0]
    assert cure.title == r"\x1b[2J"
    assert cure.patch == (r"    x\x1b[2J", r"y\u202e")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (TrialOutcome(finite=True, max_rel_err=0.0125), "finite, within 1.25 % of fp32"),
        (TrialOutcome(finite=True, max_rel_err=None), "finite, nothing to compare with fp32"),
        (TrialOutcome(finite=False, max_rel_err=None), "still non-finite"),
    ],
)
def test_outcomes(outcome, text):
    assert describe_outcome(outcome) == text


def test_islands():
    island = Island(modules=("a", "b"), minimal=True)
    search = IslandSearch(islands=(island, replace(island, modules=("c",))), num_modules=9, num_probes=5, complete=True)
    assert describe_islands(search) == "a and b; or in c (none can be left out; 9 modules, 5 runs)"
    cut = replace(search, islands=(replace(island, minimal=False),), complete=False)
    assert describe_islands(cut) == "a and b (perhaps not the smallest; 9 modules, 5 runs, search cut short)"


USE = EpsUse(place="module", module="norm", type="Norm", name="eps", value=1e-8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "norm.eps = 1e-08 was not seen in use"),
        ({"dtype": FP16, "effect": "zero"}, "norm.eps = 1e-08 is zero in fp16"),
        ({"dtype": FP16, "effect": "normal", "absorbed_share": 0.5},
         "norm.eps = 1e-08 is kept in fp16, and is absorbed by 50 % of what it is added to"),
        ({"dtype": FP16, "effect": "subnormal", "rel_err": 0.19}, "norm.eps = 1e-08 is subnormal in fp16 and 19 % off"),
        ({"place": "op", "op": "add", "dtype": FP16, "effect": "zero"}, "norm.add.eps = 1e-08 is zero in fp16"),
    ],
)  # fmt: skip
def test_small_constants(changes, text):
    assert describe_eps(replace(USE, **changes)) == text
