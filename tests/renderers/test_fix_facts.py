"""Fixes and trials in sentences."""

from __future__ import annotations

import io
from dataclasses import replace

import factory
import pytest
from rich.console import Console

from nandoctor.causes.log_space import STABLE_FORM
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
from nandoctor.renderers.fix_facts import describe_outcome, list_fixes, summarize_fixes
from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.notebook import report_html
from nandoctor.renderers.table import describe_use, list_small_constants
from nandoctor.renderers.terminal import print_report
from nandoctor.renderers.trial_facts import describe_setting, fp32_facts, trial_facts


def facts(report):
    return [(fact.label, fact.text) for fact in trial_facts(report)]


def test_nothing_was_tried_and_nothing_is_said():
    assert facts(factory.precision()) == []
    assert list_fixes(factory.precision()) == ()
    assert summarize_fixes(factory.precision()) is None


def test_the_first_fix_is_told_in_full_and_the_others_counted():
    told = summarize_fixes(factory.fixable())
    assert told.heading == "Fix 1 of 3, verified: An eps that fp16 holds at net.py:45"
    assert told.patch == ("- return x / torch.sqrt(variance + 1e-8)", "+ return x / torch.sqrt(variance + 1e-5)")
    assert [(fact.label, fact.text) for fact in told.facts] == [
        ("apply it", "nandoctor fix NaN.pth --model net.py:Net --write"),
        ("checked", "output finite, 0.062 % off fp32; gradients finite, of the loss; samples in another order"),
        ("not checked", "small noise on the inputs: the budget was spent"),
        ("or", "encoder.blocks.2.attention in fp32 (finite, within 0.062 % of fp32); 1 more in the report"),
    ]


def report_text(report):
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    return console.file.getvalue()


def checks(*texts):
    return tuple(Check(name=name, status="passed", text=text) for name, text in texts)


def test_what_was_checked_takes_two_lines_on_a_screen():
    long = "gradients of a stand-in loss finite at loss scale 65,536, 0.22 % off fp32; at 65,536 they overflow anyway"
    others = [(f"variation {place}", "output and gradients finite") for place in range(6)]
    skipped = [
        Check(name=name, status="not-checked", text="not known") for name in ("loss", "loss scale", "other seed")
    ]
    made = factory.fixable()
    passed = checks(("output", "finite, 0.44 % off fp32"), ("gradients", long), *others)
    made = replace(made, fixes=(replace(made.fixes[0], checks=(*passed, *skipped)),))
    brief = {fact.label: fact.text for fact in summarize_fixes(made).facts}
    assert brief["checked"] == (
        "output finite, 0.44 % off fp32; "
        "gradients of a stand-in loss finite at loss scale 65,536, 0.22 % off fp32; 6 more checks"
    )
    assert len(brief["checked"]) < 2 * 62
    assert brief["not checked"] == "loss: not known; loss scale: not known; other seed"
    whole = [(fact.label, fact.text) for fact in list_fixes(made)[0].checks]
    assert ("checked", long) in whole
    assert [("checked", f"{name}: output and gradients finite") for name, _ in others] == whole[2:8]
    assert whole[-1] == ("not checked", "other seed: not known")


@pytest.mark.parametrize("surface", [report_text, report_markdown, factory.sketch_of, report_html])
def test_where_nothing_was_found_every_surface_says_why(surface):
    none = replace(factory.precision(), search_notes=("No change was found to try.",))
    told = surface(none)
    assert told.index("No fix was found") < told.index("No change was found to try.")
    tried = replace(factory.fixable(), fixes=factory.fixable().fixes[-1:], search_notes=("The step is as before.",))
    told = surface(tried)
    assert "No fix was verified" in told
    assert told.count("The step is as before.") == (2 if surface is factory.sketch_of else 1)  # as Markdown on the page
    solved = replace(factory.fixable(), search_notes=("The budget was spent.",))
    assert "The budget was spent." in surface(solved)
    assert "No fix was" not in surface(solved)


def test_only_one_fix_is_not_counted():
    made = factory.fixable()
    told = summarize_fixes(replace(made, fixes=made.fixes[:1]))
    assert told.heading == "Fix, verified: An eps that fp16 holds at net.py:45"
    assert "or" not in [fact.label for fact in told.facts]


def test_without_a_command_line_a_diff_is_applied_by_git():
    made = factory.fixable()
    told = summarize_fixes(replace(made, arguments=()))
    assert ("apply it", "git apply, in your project") in [(fact.label, fact.text) for fact in told.facts]


@pytest.mark.parametrize(
    ("changes", "state", "result"),
    [
        ({"verified": True}, "verified", "verified"),
        ({"outcome": TrialOutcome(finite=True, max_rel_err=0.047)}, "off", "finite, but 4.7 % off fp32"),
        (
            {"outcome": TrialOutcome(finite=True, max_rel_err=0.001)},
            "off",
            "finite when tried, but not written as code",
        ),
        ({"outcome": TrialOutcome(finite=False, max_rel_err=None)}, "failed", "failed: still non-finite"),
        (
            {"checks": (Check(name="gradients", status="failed", text="not all finite"),)},
            "failed",
            "failed: gradients: not all finite",
        ),
    ],
)
def test_the_state_of_a_fix(changes, state, result):
    sound = replace(factory.fixable().fixes[0], verified=False, checks=())
    shown = list_fixes(replace(factory.fixable(), fixes=(replace(sound, **changes),)))[0]
    assert (shown.state, shown.result) == (state, result)


def test_a_lost_constant_is_told_where_it_is_not_the_cause():
    assert "eps" not in dict(facts(factory.fixable()))
    other = replace(factory.fixable(), cause=replace(factory.fixable().cause, code="matmul-overflow"))
    assert dict(facts(other))["eps"].startswith("1e-8 in encoder.blocks.2.attention (net.py:45), used by add, is zero")


def test_variations_tell_what_is_finite_and_what_is_not():
    assert facts(factory.fixable())[-1] == (
        "variations",
        "forward finite: bf16, without sample 2",
    )  # in either mode it fails
    made = replace(factory.fixable(), counterfactuals=factory.fixable().counterfactuals[-1:])
    assert facts(made)[-1] == ("variations", "the step fails in all of them")
    made = factory.fixable()
    runs = replace(made.runs, autocast=replace(made.runs.autocast, finite=True))  # its gradients alone fail
    assert facts(replace(made, runs=runs))[-1] == ("variations", "step finite: bf16, without sample 2")


def test_a_variation_that_is_far_from_fp32_says_so():
    made = factory.fixable()
    far = replace(made.counterfactuals[0], outcome=TrialOutcome(finite=True, max_rel_err=0.047))
    assert facts(replace(made, counterfactuals=(far,)))[-1] == (
        "variations",
        "forward finite: bf16 (4.7 % off fp32)",
    )


def test_constants_are_a_table():
    assert list_small_constants(factory.fixable().eps_audit)[0].cells == (
        "1e-8",
        "encoder.blocks.2.attention",
        "net.py:45",
        "add",
        "is zero in fp16, and lost in 100 % of what it is added to",
    )
    many = (replace(USE, num_uses=3), replace(USE, place="optimizer"))
    assert [line.cells[1] for line in list_small_constants(many)] == ["norm.eps and 2 more", "the optimizer"]


def test_a_variation_far_from_fp32_says_how_far():
    made = factory.fixable()
    far = replace(
        made.counterfactuals[0], setting=StepSetting(dtype=FP16), outcome=TrialOutcome(finite=True, max_rel_err=1.2)
    )
    told = [text for _, text in facts(replace(made, counterfactuals=(far, *made.counterfactuals)))]
    assert "forward finite: fp16 (120 % off fp32), bf16, without sample 2" in told


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (StepSetting(dtype=FP16), "fp16"),
        (StepSetting(training=False), "eval mode"),
        (StepSetting(only=(1,)), "sample 1 alone"),
        (StepSetting(without=(0, 2, 3, 5, 6)), "without samples 0, 2, 3 and 2 more"),
        (StepSetting(loss_scale=65536.0), "loss scale 65,536"),
        (StepSetting(seed=3), "seed 3"),
    ],
)
def test_settings_in_words(setting, text):
    assert describe_setting(setting) == text


def test_what_did_not_help_comes_last_and_says_so():
    fixes = list_fixes(factory.fixable())
    assert [fix.verified for fix in fixes] == [True, True, True, False]
    failed = summarize_fixes(replace(factory.fixable(), fixes=factory.fixable().fixes[-1:]))
    assert failed.heading == "No fix was verified"
    assert [fact.text for fact in failed.facts] == ["Clamp what add returns (failed: still non-finite)"]


def test_a_long_patch_is_cut_on_the_terminal_only():
    made = factory.fixable()
    long = replace(made.fixes[0], patch="\n".join(f"+ line {i}" for i in range(60)))
    made = replace(made, fixes=(long,))
    lines = summarize_fixes(made).patch
    assert (len(lines), lines[-1]) == (41, "... 20 more lines")
    assert len(list_fixes(made)[0].patch) == 60
    code = replace(made, fixes=(replace(long, kind="snippet"),), arguments=("nan.pth", "--model", "net.py:Net"))
    shown = summarize_fixes(code)
    assert (len(shown.patch), shown.patch[-1]) == (41, "... 20 more lines")
    assert (shown.facts[0].label, shown.facts[0].text) == ("all of it", "nandoctor fix nan.pth --model net.py:Net")


def test_a_patch_cannot_move_the_cursor():
    made = factory.fixable()
    hostile = replace(made.fixes[0], title="\x1b[2J", patch="\tx\x1b[2J\r\ny\u202e")
    fix = list_fixes(replace(made, fixes=(hostile,)))[0]
    assert fix.title == r"\x1b[2J"
    assert fix.patch == ("\tx\\x1b[2J", r"y\u202e")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (TrialOutcome(finite=True, max_rel_err=0.0125), "finite, within 1.2 % of fp32"),
        (TrialOutcome(finite=True, max_rel_err=0.0), "finite, equal to fp32"),
        (TrialOutcome(finite=True, max_rel_err=None), "finite, nothing to compare with fp32"),
        (TrialOutcome(finite=False, max_rel_err=None), "still non-finite"),
    ],
)
def test_outcomes(outcome, text):
    assert describe_outcome(outcome) == text


def test_fp32_sets():
    fp32_set = Fp32Set(modules=(Fp32Module(module="a"), Fp32Module(module="b")))
    search = Fp32SetSearch(
        sets=(fp32_set, replace(fp32_set, modules=(Fp32Module(module="c"),))),
        num_modules=9,
        num_probes=5,
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


USE = EpsUse(place="module", module="norm", type="Norm", name="eps", value=1e-8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "norm.eps was not seen in use"),
        ({"dtype": FP16, "effect": "zero"}, "norm.eps is zero in fp16"),
        ({"dtype": FP16, "effect": "normal", "absorbed_share": 0.5},
         "norm.eps is kept in fp16, and lost in 50 % of what it is added to"),
        ({"dtype": FP16, "effect": "subnormal", "rel_err": 0.19}, "norm.eps is subnormal in fp16 and 19 % off"),
        ({"dtype": FP16, "effect": "normal", "bound_share": 0.25},
         "norm.eps is kept in fp16, and 25 % of the values are clamped to it"),
        ({"place": "op", "op": "add", "dtype": FP16, "effect": "zero"}, "norm, used by add, is zero in fp16"),
    ],
)  # fmt: skip
def test_small_constants(changes, text):
    assert describe_use(replace(USE, **changes)) == text


def test_what_held_on_this_batch_comes_before_what_is_off():
    made = factory.fixable()
    far = TrialOutcome(finite=True, max_rel_err=0.8)
    off = replace(made.fixes[0], verified=False, rank=0, title="Off", outcome=far, checks=())
    checks = (
        Check(name="output", status="passed", text="finite, 0.1 % off fp32"),
        Check(name="inputs doubled", status="failed", text="output is not finite"),
    )
    held = replace(made.fixes[0], verified=False, rank=1, title="Held", checks=checks)
    assert [fix.title for fix in list_fixes(replace(made, fixes=(off, held)))] == ["Held", "Off"]


def test_leaving_samples_out_is_no_fix_of_the_code():
    made = factory.fixable()
    data = replace(made.fixes[0], kind="data", title="Leave the affected samples out of the batch")
    told = summarize_fixes(replace(made, verdict="numerics", fixes=(data,)))
    assert told.heading == "Workaround, verified on this batch alone: Leave the affected samples out of the batch"


def test_a_change_that_is_off_elsewhere_says_so():
    text = "finite, 0.1 % off fp32, but 80 % off float64 with inputs of 0.5 times the size"
    checks = (Check(name="output", status="failed", text=text),)
    fix = replace(factory.fixable().fixes[0], verified=False, checks=checks)
    shown = list_fixes(replace(factory.fixable(), fixes=(fix,)))[0]
    assert (shown.state, shown.result) == ("off", text)


def test_beside_a_clamp_what_is_better_is_told():
    made = factory.fixable()
    stable = Evidence(name=STABLE_FORM, value="F.logsigmoid", text="return the logits")
    told = summarize_fixes(replace(made, cause=replace(made.cause, evidence=(stable,))))
    assert ("better", "return the logits") in [(fact.label, fact.text) for fact in told.facts]
