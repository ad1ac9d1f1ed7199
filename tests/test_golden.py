"""What every sample's report decides and looks like; `UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py` renews it.

Versions, times and paths are left out. The texts are compared by their words, in their order; what is decided also by
its numbers, within rounding: other processors sum in another order.
"""

import json
import math
import os
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from report_schema import describe_schema
from wording import plain_text, words

from nandoctor.evidence.codec import to_plain
from nandoctor.evidence.report import SCHEMA, Grade, Report
from nandoctor.views.markdown import draw_markdown
from nandoctor.views.report import report_document

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SAMPLES = sorted(path.stem for path in (ROOT / "sample_dumps").glob("*.pth"))
GRADES = get_args(Grade)
CLOSE = 0.05

each_sample = pytest.mark.parametrize("sample", SAMPLES)


def without_paths(text):
    return text.replace(str(ROOT), "ROOT")


def terminal(report):
    return without_paths(plain_text(report_document(report), width=80))


def markdown(report):
    lines = without_paths(draw_markdown(report_document(report, "page"))).splitlines()
    machine = ("| nandoctor |", "| torch |", "| python |", "| platform |", "| device |")
    return "\n".join(line for line in lines if not line.startswith(machine)) + "\n"


def decisions(report):
    """What the report decides, as plain data: places, kinds and names, without what was measured on the way."""
    data = json.loads(without_paths(json.dumps(to_plain(report))))
    runs = data["runs"] or {}
    return {
        "schema": data["schema"],
        "verdict": data["verdict"],
        "grade": data["reproduction"]["grade"],
        "first_nonfinite": some(data["first_nonfinite"], "phase module type call where seen_in kinds samples would_be"),
        "origin": some(data["origin"], "phase module type call op source kinds num_bad numel samples would_be"),
        "cause": some(data["cause"], "code title"),
        "also": [some(other["origin"], "phase module op") for other in data["also"]],
        "chain": [some(link, "module op") for link in data["chain"]],
        "fixes": [some(fix, "rank title verified") for fix in data["fixes"]],
        "counterfactuals": [setting_of(one) for one in data["counterfactuals"]],
        "bad_weights": [array["name"] for array in data["dump"]["bad_weights"]],
        "bad_buffers": [array["name"] for array in data["dump"]["bad_buffers"]],
        "calls": {run: calls_of(runs[run]) for run in ("autocast", "fp32") if runs},
        "notes": data["notes"],
        "next_steps": data["next_steps"],
    }


def some(record, names):
    return record and {name: record[name] for name in names.split()}


def setting_of(counterfactual):
    return {name: value for name, value in counterfactual["setting"].items() if value is not None}


def calls_of(run):
    return [f"{row['module']}#{row['call']} {row['type']}" for row in run["modules"]]


def differences(data, golden, place="report"):
    """The places where two reports decide differently; numbers may differ by rounding, a replay may agree better."""
    if isinstance(data, dict) and isinstance(golden, dict):
        for key in data.keys() | golden.keys():
            yield from differences(data.get(key), golden.get(key), f"{place}.{key}")
    elif isinstance(data, list) and isinstance(golden, list) and len(data) == len(golden):
        for index, (one, other) in enumerate(zip(data, golden, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif not alike(data, golden, place):
        yield f"{place}: {data!r} is not {golden!r}"


def alike(one, golden, place):
    if place.endswith(".grade"):
        return GRADES.index(one) <= max(GRADES.index(golden), GRADES.index("same-mask"))
    if isinstance(one, float) and isinstance(golden, int | float):
        return math.isclose(one, golden, rel_tol=CLOSE, abs_tol=1e-3)
    if isinstance(one, str) and isinstance(golden, str):
        return words(one) == words(golden)
    return one == golden


def updated(path, text):
    """The golden text, written first where that was asked for."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def test_every_sample_has_its_golden_files_and_no_other_is_there():
    names = {f"{sample}.{ending}" for sample in SAMPLES for ending in ("txt", "md", "json")}
    assert {path.name for path in GOLDEN.iterdir()} == names


@each_sample
def test_terminal(sample, sample_reports):
    text = terminal(sample_reports[sample])
    assert words(text) == words(updated(GOLDEN / f"{sample}.txt", text))
    copied = {line for fix in sample_reports[sample].fixes for line in fix.patch.splitlines()}  # never broken
    assert max(len(line) for line in text.splitlines() if line not in copied and " nandoctor " not in line) <= 80
    assert len(text.splitlines()) <= 56


@each_sample
def test_markdown(sample, sample_reports):
    text = markdown(sample_reports[sample])
    assert words(text) == words(updated(GOLDEN / f"{sample}.md", text))


@each_sample
def test_decisions(sample, sample_reports):
    data = decisions(sample_reports[sample])
    golden = json.loads(updated(GOLDEN / f"{sample}.json", json.dumps(data, indent=1) + "\n"))
    assert list(differences(data, golden)) == []


def test_the_published_schema_accepts_the_reports(sample_reports):
    """Of a forward, of a backward, of state, and of weights alone; the others have the same parts."""
    schema = describe_schema(Report, title=SCHEMA)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for sample in ("unet_blank_tile", "siamese_duplicate", "poisoned_buffers", "weights_only"):
        plain = to_plain(sample_reports[sample])
        validator.validate({**plain, "of a later version": 1})
        lacking = {name: item for name, item in plain.items() if name != "verdict"}
        assert not any(map(validator.is_valid, (lacking, {**plain, "fixes": [{}]}, {**plain, "fp32_error": "much"})))


def test_the_comparison_sees_what_differs():
    golden = {"a": [1.0, "2.5 of 3"], "b": None, "c": 1, "grade": "same-mask"}
    assert list(differences({"a": [1.001, "2.6 of 3"], "b": None, "c": 1, "grade": "exact"}, golden)) == []
    other = {"a": [2.0, "two"], "b": 1, "c": 2, "grade": "elsewhere"}
    assert len(list(differences(other, golden))) == 5
    assert len(list(differences({"a": [1.0], "grade": "exact"}, golden))) == 2
    assert list(differences({"grade": "same-mask"}, {"grade": "exact"})) == []
