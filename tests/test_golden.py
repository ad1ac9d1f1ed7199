"""What every sample's report looks like; `UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py` writes it anew.

Versions, times and paths are left out, and numbers may differ in their last digits: other processors sum in another
order.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

import nandoctor
from nandoctor.evidence.json_schema import describe_schema
from nandoctor.evidence.report import SCHEMA, Report
from nandoctor.evidence.serialization import to_plain
from nandoctor.renderers.markdown import report_markdown
from nandoctor.renderers.terminal import print_report

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
SAMPLES = sorted(path.stem for path in (ROOT / "sample_dumps").glob("*.pth"))
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")
CLOSE = 0.05

each_sample = pytest.mark.parametrize("sample", SAMPLES)


@pytest.fixture(scope="module")
def reports():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "path", list(sys.path))
        return {sample: nandoctor.replay(f"sample_dumps/{sample}.pth").report for sample in SAMPLES}


def without_paths(text):
    return text.replace(str(ROOT), "ROOT")


def terminal(report):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_report(report, console)
    return without_paths("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n")


def markdown(report):
    lines = without_paths(report_markdown(report)).splitlines()
    machine = ("| nandoctor |", "| torch |", "| python |", "| platform |", "| device |")
    return "\n".join(line for line in lines if not line.startswith(machine)) + "\n"


def plain(report):
    """The report as JSON has it; of the layers one in full, and the names of all."""
    data = json.loads(without_paths(json.dumps(to_plain(report))))
    data["environment"] = dict.fromkeys(data["environment"], "...")
    for run in (data["runs"] or {}).values():
        if isinstance(run, dict):
            rows = run["modules"]
            run |= {"elapsed_s": 0.0, "modules": rows[:1]}
            run["module_calls"] = [f"{row['module']}#{row['call']} {row['type']}" for row in rows]
    for tensor in list(find_censuses(data)):
        tensor["by_sample"] = tensor["by_sample"][:2]
    return data


def find_censuses(data):
    if isinstance(data, dict):
        if "by_sample" in data:
            yield data
        for value in data.values():
            yield from find_censuses(value)
    elif isinstance(data, list):
        for value in data:
            yield from find_censuses(value)


def same_text(text, golden):
    """Equal but for digits, and for the bars that they draw."""
    plainer = [NUMBER.sub("#", re.sub("[█░]+", "", one)).split() for one in (text, golden)]
    return plainer[0] == plainer[1]


def differences(data, golden, place="report"):
    """The places where two reports differ by more than rounding."""
    if isinstance(data, dict) and isinstance(golden, dict):
        for key in data.keys() | golden.keys():
            yield from differences(data.get(key), golden.get(key), f"{place}.{key}")
    elif isinstance(data, list) and isinstance(golden, list) and len(data) == len(golden):
        for index, (one, other) in enumerate(zip(data, golden, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif isinstance(data, float) and isinstance(golden, (int, float)):
        if not math.isclose(data, golden, rel_tol=CLOSE, abs_tol=1e-3):
            yield f"{place}: {data} is not {golden}"
    elif isinstance(data, str) and isinstance(golden, str):
        if not same_text(data, golden):
            yield f"{place}: {data!r} is not {golden!r}"
    elif data != golden:
        yield f"{place}: {data!r} is not {golden!r}"


def updated(path, text):
    """The golden text, written first where that was asked for."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def test_every_sample_has_its_golden_files_and_no_other_is_there():
    names = {f"{sample}.{ending}" for sample in SAMPLES for ending in ("txt", "md", "json")}
    assert {path.name for path in GOLDEN.iterdir()} == names


@each_sample
def test_terminal(sample, reports):
    text = terminal(reports[sample])
    assert same_text(text, updated(GOLDEN / f"{sample}.txt", text))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 40


@each_sample
def test_markdown(sample, reports):
    text = markdown(reports[sample])
    assert same_text(text, updated(GOLDEN / f"{sample}.md", text))


@each_sample
def test_json(sample, reports):
    data = plain(reports[sample])
    golden = json.loads(updated(GOLDEN / f"{sample}.json", json.dumps(data, indent=1) + "\n"))
    assert list(differences(data, golden)) == []


@each_sample
def test_the_published_schema_accepts_the_report(sample, reports):
    jsonschema.validate(to_plain(reports[sample]), describe_schema(Report, title=SCHEMA))


def test_the_comparison_sees_what_differs():
    golden = {"a": [1.0, "2.5 of 3"], "b": None, "c": 1}
    assert list(differences({"a": [1.001, "2.6 of 3"], "b": None, "c": 1}, golden)) == []
    assert len(list(differences({"a": [2.0, "two"], "b": 1, "c": 2}, golden))) == 4
    assert len(list(differences({"a": [1.0]}, golden))) == 2
