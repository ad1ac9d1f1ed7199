"""Fixes and trials in sentences."""

from dataclasses import replace

import factory
import pytest

from nandoctor.causes.candidates import STABLE_FORM
from nandoctor.evidence.formats import FP16
from nandoctor.evidence.report import (
    Check,
    EpsUse,
    Evidence,
    Fp32Module,
    Fp32Set,
    Fp32SetSearch,
    StepSetting,
    TrialOutcome,
)
from nandoctor.views.blocks import Facts, Patch
from nandoctor.views.fixes import describe_result, every_check, fix_section
from nandoctor.views.report import describe_setting, describe_use, fp32_facts, trial_facts


def facts(report):
    return [(fact.label, fact.text) for fact in trial_facts(report)]


class Told:
    """The first fix on a screen: its heading, its lines, and the facts about it and the others."""

    def __init__(self, report):
        section = fix_section(report, "screen")
        blocks = {type(block): block for block in section.blocks}
        self.heading = section.title
        self.patch = blocks[Patch].lines if Patch in blocks else []
        self.facts = [(fact.label, fact.text) for fact in blocks[Facts].facts]


def failed(name, text):
    return Check(name=name, status="failed", text=text)


def checks(*texts):
    return tuple(Check(name=name, status="passed", text=text) for name, text in texts)


def test_what_was_checked_takes_two_lines_on_a_screen():
    long = "gradients of a made-up loss finite at loss scale 65,536, 0.22 % off fp32; at 65,536 they overflow anyway"
    others = [(f"variation {place}", "output and gradients finite") for place in range(6)]
    skipped = [
        Check(name=name, status="not-checked", text="not known") for name in ("loss", "loss scale", "other seed")
    ]
    made = factory.fixable()
    passed = checks(("output", "finite, 0.44 % off fp32"), ("gradients", long), *others)
    made = replace(made, fixes=(replace(made.fixes[0], checks=(*passed, *skipped)),))
    brief = dict(Told(made).facts)
    assert brief["checked"] == (
        "output finite, 0.44 % off fp32; "
        "gradients of a made-up loss finite at loss scale 65,536, 0.22 % off fp32; 6 more checks"
    )
    assert len(brief["checked"]) < 2 * 62
    assert brief["not checked"] == "loss: not known; loss scale: not known; other seed"
    whole = [(fact.label, fact.text) for fact in every_check(made.fixes[0])]
    assert ("checked", long) in whole
    alike = ", ".join(f"variation {place}" for place in range(5))
    assert whole[2] == ("checked", f"{alike} and variation 5: output and gradients finite")
    assert whole[3:] == [("not checked", "loss, loss scale and other seed: not known")]


def test_without_a_command_line_a_diff_is_applied_by_git():
    made = factory.fixable()
    fix = replace(made.fixes[0], patch_root="/home/them")
    told = Told(replace(made, arguments=(), fixes=(fix,)))
    assert ("apply it", "git apply, in /home/them") in told.facts


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"verified": True}, "verified"),
        ({}, "finite when tried, but not written as code"),
        ({"outcome": TrialOutcome(finite=False, max_rel_err=None)}, "failed: still non-finite"),
        ({"checks": (failed("gradients", "not all finite"),)}, "failed: gradients: not all finite"),
        ({"checks": (failed("output", "finite, but 80 % off float64"),)}, "finite, but 80 % off float64"),
    ],
)
def test_what_came_of_a_fix(changes, result):
    sound = replace(factory.fixable().fixes[0], verified=False, checks=())
    assert describe_result(replace(sound, **changes)) == result


SETTINGS = [
    (StepSetting(dtype=FP16), "fp16"),
    (StepSetting(training=False), "eval mode"),
    (StepSetting(only=(1,)), "sample 1 alone"),
    (StepSetting(without=(0, 2, 3, 5, 6)), "without samples 0, 2, 3 and 2 more"),
]


def test_settings_in_words():
    assert [describe_setting(setting) for setting, _ in SETTINGS] == [text for _, text in SETTINGS]


def test_fp32_sets():
    fp32_set = Fp32Set(modules=(Fp32Module(module="a"), Fp32Module(module="b")))
    search = Fp32SetSearch(
        sets=(fp32_set, replace(fp32_set, modules=(Fp32Module(module="c"),))),
        complete=True,
    )
    made = factory.fixable()
    verified = replace(made, fp32_sets=search)

    def told(report, **changes):
        return next(fp32_facts(replace(report, fp32_sets=replace(search, **changes)))).text

    assert told(verified) == "enough: a and b together; or c"
    refused = replace(made, fixes=tuple(replace(fix, verified=False) for fix in made.fixes))
    assert told(refused) == "finite then, though not verified as a fix: a and b together; or c"
    told_cut = told(verified, sets=(fp32_set,), complete=False)
    assert told_cut == "enough: a and b together (the search was cut short)"
    names = [(Fp32Module(module=name, children=False),) for name in ("", "x")]
    own = tuple(replace(fp32_set, modules=modules) for modules in names)
    assert told(verified, sets=own) == "enough: the model without its submodules; or x without its submodules"
    assert list(fp32_facts(replace(made, fp32_sets=replace(search, sets=())))) == []


USE = EpsUse(place="op", module="norm", type="Norm", name="eps", value=1e-8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "norm was not seen in use"),
        ({"dtype": FP16, "effect": "normal"}, "norm is kept in fp16"),
        ({"dtype": FP16, "effect": "subnormal", "rel_err": 0.19}, "norm is subnormal in fp16 and 19 % off"),
        ({"op": "add", "dtype": FP16, "effect": "zero"}, "norm, used by add, is zero in fp16"),
    ],
)  # fmt: skip
def test_small_constants(changes, text):
    assert describe_use(replace(USE, **changes)) == text


def test_beside_a_clamp_what_is_better_is_told():
    made = factory.fixable()
    stable = Evidence(name=STABLE_FORM, value="F.logsigmoid", text="return the logits")
    told = Told(replace(made, cause=replace(made.cause, evidence=(stable,))))
    assert ("better", "return the logits") in told.facts
