"""The evidence of a report in sentences."""

from dataclasses import replace
from typing import get_args

import factory
from one_test import for_each

from nandoctor.evidence.formats import BF16, FP16, FP32
from nandoctor.evidence.report import Reproduction, Verdict
from nandoctor.views.evidence import MEANINGS, describe_reproduction, evidence_facts, list_operands


def facts(report):
    return {fact.label: fact.text for fact in evidence_facts(report)}


def with_first(**changes):
    report = factory.precision()
    return facts(replace(report, first_nonfinite=factory.put(report.first_nonfinite, **changes)))


REPRODUCES, SPOILT = "reproduces your run", "512 of 4,096 values of logit are non-finite"
GRADES = [
    ({"grade": "exact", "num_bad_saved": 0}, f"{REPRODUCES}: logit is finite in both, and identical"),
    ({"grade": "exact"}, f"{REPRODUCES}: the same {SPOILT}, all others identical"),
    (
        {"grade": "same-mask", "max_rel_err": 0.0123},
        f"{REPRODUCES}: the same {SPOILT}, all others within 1.2 % of the largest saved value",
    ),
    (
        {"grade": "same-mask", "num_bad_saved": 4096, "max_rel_err": None},
        f"{REPRODUCES}: the same 4,096 of 4,096 values of logit are non-finite, no others to compare",
    ),
    (
        {"grade": "same-mask", "num_bad_saved": 0, "max_rel_err": 0.08},
        f"{REPRODUCES} in part: logit is finite in both, and within 8 % of the largest saved value",
    ),
    (
        {"grade": "same-mask", "max_rel_err": 1.8},
        f"gives other values than your run: the same {SPOILT}, all others within 180 % of the largest saved value",
    ),
    (
        {"grade": "elsewhere", "num_bad_replayed": 300},
        f"does not reproduce your run: {SPOILT} in the file, 300 in the replay",
    ),
    (
        {"grade": "finite", "num_bad_replayed": 0},
        f"does not reproduce your run: {SPOILT} in the file, none in the replay",
    ),
    ({"grade": "no-reference"}, "unchecked: none of the outputs is known to be the saved logit"),
    ({"grade": "no-reference", "output": None}, "unchecked: there is no saved output to compare with"),
]


@for_each(GRADES, star=True)
def test_grades_in_words(changes, text):
    whole = Reproduction(grade="exact", output="logit", num_bad_saved=512, num_bad_replayed=512, numel=4096)
    assert describe_reproduction(replace(whole, **changes)) == text


FIRST = [
    ("extent", {"samples": (0, 3)}, "samples 0 and 3 (fp16 "),
    ("extent", {"samples": (0, 1, 2, 3)}, ", every sample ("),
    ("extent", {"samples": None}, "65,536 (fp16 [4, 16, 32, 32], first at"),
    (
        "extent",
        {"value": factory.tensor(nonfinite=factory.counts(9), shape=(64, 8)), "samples": tuple(range(0, 18, 2))},
        "samples 0, 2, 4 and 6 more",
    ),
]
FIRST += [
    ("in fp32", {"would_be": value, "value": factory.tensor(nonfinite=factory.counts(8192), dtype=dtype)}, text)
    for value, dtype, text in (
        (65519.0, FP16, "finite, up to 65,519, which fp16 can hold (65,504)"),
        (65520.0, FP16, "computes 65,520 here: 0.024 % above what fp16 can hold (65,504)"),
        (1e3, BF16, "finite, up to 1,000, which bf16 can hold (3.39e38)"),
        (12.5, FP32, "finite, up to 12.5"),
    )
]


@for_each(FIRST, star=True)
def test_the_first_nonfinite_layer_in_words(label, changes, text):
    assert text in with_first(**changes)[label]


def test_what_fp32_gives_is_said_only_where_it_is_finite():
    assert "in fp32" not in facts(factory.numerics())
    assert "in fp32" not in facts(factory.nonfinite_input())


def test_an_early_end():
    runs = factory.network(8)
    told = facts(factory.report(replace(runs, autocast=replace(runs.autocast, raised="boom\n" * 99))))
    assert told["raised"].startswith("the fp16 run stopped early: boom boom")
    assert len(told["raised"]) < 200


def test_every_verdict_has_a_meaning():
    assert MEANINGS.keys() == set(get_args(Verdict))


def test_tensors_have_the_names_of_the_code_or_a_place():
    made = factory.fixable().origin
    made = replace(made, source=replace(made.source, expression="x / torch.sqrt(variance + 1e-8)"))
    assert [fact.label for fact in list_operands(made)] == ["`x`", "`torch.sqrt(variance + 1e-8)`", "result"]
    unknown = replace(made, source=None)
    assert [fact.label for fact in list_operands(unknown)] == ["the first operand", "the divisor", "result"]
    backward = replace(made, phase="backward")
    assert [fact.label for fact in list_operands(backward)][:2] == ["the first operand", "the divisor"]
    assert not any(word in fact.text for fact in list_operands(made) for word in ("self", "other"))
