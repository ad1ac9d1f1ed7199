"""The report on a screen, and as an issue shows it."""

import io
import re
from dataclasses import replace

import factory
import pytest
from rich.console import Console
from surfaces import markdown, terminal

from nandoctor.views.report import report_document
from nandoctor.views.terminal import print_document


def table_rows(text):
    lines = text[text.index("  layer ") :].splitlines()[1:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[: lines.index("")] if "." in line]
    return {row[0].removeprefix("> "): row[1:] for row in rows}


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_a_report_fits_one_screen(make):
    report = make()
    lines = terminal(report).splitlines()
    assert len(lines) <= (35 if report.fixes else 30)
    assert max(map(len, lines)) <= 80


def test_a_wrong_fp32_is_told_before_any_fix():
    text = terminal(replace(factory.fixable(), fp32_error=0.68), width=300)
    assert "fp32's own output is wrong, 68 % off float64" in text.partition("Fix")[0]


def test_long_names_are_cut_in_their_middle_and_stay_on_one_line():
    made = factory.precision(400, nonfinite_from=250)
    deep = "backbone.stages.3.blocks." + "x" * 80 + ".attention.project"
    runs = made.runs
    rows = tuple(
        factory.put(row, module=deep, type="T" * 60) if not row.finite else row for row in runs.autocast.modules
    )
    report = replace(made, runs=replace(runs, autocast=replace(runs.autocast, modules=rows)))
    lines = terminal(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 30


def test_the_kinds_of_a_nonfinite_layer_stand_in_its_cell():
    made = factory.precision()
    both = replace(factory.counts(3), num_posinf=1, num_neginf=2)
    for counts, text in ((both, "NaN ±Inf"), (factory.counts(3, kind="-inf"), "-Inf"), (None, "NaN/Inf")):
        stats = replace(factory.tensor(1.0), finite=False, counts=counts)
        rows = tuple(replace(row, outputs=(stats,)) if not row.finite else row for row in made.runs.autocast.modules)
        report = replace(made, runs=replace(made.runs, autocast=replace(made.runs.autocast, modules=rows)))
        assert table_rows(terminal(report, width=120))["encoder.blocks.2.attention"][1] == text


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "latin-1"])
def test_any_encoding_can_take_the_report(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    made = factory.precision()
    report = replace(made, headline="层 is first", notes=("Größe",))
    print_document(report_document(report), Console(file=file, width=80))
    file.flush()
    text = file.buffer.getvalue().decode(encoding)
    assert "? is first" in text


HOSTILE = "<script>x</script> @someone #12 |a|b| `c` [d](e) *f*\x1b\nnew\u202e"


def test_a_patch_cannot_leave_its_fence():
    made = factory.fixable()
    patch = replace(made.fixes[0], kind="snippet", patch="x\n```\n# out\n````")
    text = markdown(replace(made, fixes=(patch,)))
    assert "`````python\nx\n```\n# out\n````\n`````" in text


def test_hostile_names_are_text():
    made = factory.precision()
    rows = tuple(factory.put(row, module=HOSTILE, type=HOSTILE) for row in made.runs.autocast.modules)
    runs = replace(made.runs, autocast=replace(made.runs.autocast, modules=rows))
    text = markdown(replace(made, headline=HOSTILE, runs=runs, notes=(HOSTILE,), dump=factory.dump(path=HOSTILE)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "@someone" not in text
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", text)
