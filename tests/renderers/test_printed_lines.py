"""Lines as a terminal or a pipe gets them: no blanks at the end, within the width, and code that can be copied."""

from __future__ import annotations

import difflib
import io
import re
import subprocess
from dataclasses import replace

import factory
import factory_of_verbs
import pytest
from private_words import find_words
from rich.console import Console

from nandoctor.causes.registry import list_pages
from nandoctor.diagnosis.compare_reports import compare_reports
from nandoctor.evidence.verification import FixChoice
from nandoctor.renderers.checkup import print_checkup
from nandoctor.renderers.diff import print_comparison
from nandoctor.renderers.eps import print_uses
from nandoctor.renderers.explain import print_catalogue, print_page
from nandoctor.renderers.inspect_dump import print_inspection
from nandoctor.renderers.terminal import print_report
from nandoctor.renderers.triage import print_triage, triage_page
from nandoctor.renderers.verification import print_fix, print_verification

TITLE = "Compute the whole of a line with a rather long name in model_of_the_encoder.py in fp32, and its block too"


def long_fix():
    made = factory.fixable()
    return replace(made, fixes=(replace(made.fixes[0], title=TITLE), *made.fixes[1:]))


def choice(report):
    return FixChoice(dump="NaN.pth", headline=report.headline, pick=1, num_verified=1, fix=report.fixes[0])


PRINTED = {
    "precision": lambda console: print_report(factory.precision(), console),
    "fixable": lambda console: print_report(long_fix(), console),
    "healthy": lambda console: print_report(factory.healthy(), console),
    "state": lambda console: print_report(factory.state(), console),
    "not reproduced": lambda console: print_report(factory.not_reproduced(), console),
    "fix": lambda console: print_fix(choice(long_fix()), long_fix(), console),
    "diff": lambda console: print_comparison(compare_reports(factory.fixable(), factory.healthy()), console),
    "inspect": lambda console: print_inspection(factory.dump(), console),
    "eps": lambda console: print_uses(factory.fixable().eps_audit, console),
    "causes": lambda console: print_catalogue(list_pages(), console),
    "a cause": lambda console: print_page(list_pages()[0], console),
    "triage": lambda console: print_triage(factory_of_verbs.triage(), console),
    "checkup": lambda console: print_checkup(factory_of_verbs.checkup(), console),
    **{
        f"verify: {outcome}": lambda console, outcome=outcome: print_verification(
            factory_of_verbs.verification(outcome), console
        )
        for outcome in ("fixed", "passes", "still-fails", "cannot-tell")
    },
}


def lines(show, width):
    console = Console(file=io.StringIO(), width=width)
    show(console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("show", PRINTED.values(), ids=PRINTED)
def test_lines_fit_and_end_where_they_end(show, width):
    printed = lines(show, width)
    assert [line for line in printed if line != line.rstrip()] == []
    code = {line for fix in factory.fixable().fixes for line in fix.patch.splitlines()}
    assert [line for line in printed if len(line) > width and line not in code and "nandoctor " not in line] == []


def test_tables_fit_a_narrow_window():
    """Names are cut and columns left out; no row is broken, and none loses its numbers."""
    for name, ending in (("diff", r"NaN/Inf +22\.6$"), ("inspect", r"^image .* none$"), ("precision", r"11\.5 ████░$")):
        printed = lines(PRINTED[name], 40)
        assert any(re.search(ending, line) for line in printed), name
    for name in ("checkup", "triage"):
        assert max(map(len, lines(PRINTED[name], 40))) <= 40


@pytest.mark.parametrize("show", PRINTED.values(), ids=PRINTED)
def test_no_word_of_ours_is_printed(show):
    assert find_words("\n".join(lines(show, 80))) == []


NET = "class Norm:\n\tdef forward(self, x):\n\t\t# centred\n\n\t\treturn x / (x.std() + 1e-8)\n\n\nx = 1\n"
FILES = {
    "tabs": (NET, NET.replace("1e-8", "1e-4")),
    "first line": ("x = 1\n" * 9, "x = 2\n" + "x = 1\n" * 8),
    "last line": ("x = 1\n" * 9, "x = 1\n" * 8 + "x = 2\n"),
    "no newline": ("x = 1\n" * 8 + "y", "x = 1\n" * 7 + "x = 2\nz"),
    "two hunks": ("x = 1\n" * 30, "x = 1\n" * 5 + "y\n" + "x = 1\n" * 18 + "z\n" + "x = 1\n" * 4),
    "like a header": ("a\nb\n-- x\n" + NET, "a\nb\n" + NET),
}


@pytest.mark.parametrize("show", ["report", "fix"])
@pytest.mark.parametrize(("before", "after"), FILES.values(), ids=FILES)
def test_a_diff_on_the_screen_can_be_pasted(show, before, after, tmp_path):
    (tmp_path / "net.py").write_text(before)
    patch = "".join(unified(before, after))
    made = factory.fixable()
    made = replace(made, fixes=(replace(made.fixes[0], patch=patch),))
    shown = {"report": lambda to: print_report(made, to), "fix": lambda to: print_fix(choice(made), made, to)}
    screen = "\n".join(lines(shown[show], 80)) + "\n"
    subprocess.run(["git", "apply", "-"], input=screen, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "net.py").read_text() == after


def unified(before, after):
    """The lines of a diff, with git's mark where a file ends without a newline."""
    for line in difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a/net.py", "b/net.py"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def test_a_command_to_type_is_never_broken():
    command = f"nandoctor verify {'runs/a-long-name/' * 4}nan-step000012.pth --model train.py:make_model"
    made = factory_of_verbs.verification("cannot-tell")
    steps = (f"Confirm: {command}", command, "Name the file that you changed: --changed FILE")
    shown = {
        "verify": lambda to: print_verification(replace(made, next_steps=steps), to),
        "report": lambda to: print_report(replace(factory.healthy(), next_steps=steps), to),
        "fix": lambda to: print_fix(choice(long), long, to),
    }
    long = replace(factory.fixable(), arguments=tuple(command.split()[2:]))
    for name, ending in (("verify", "make_model"), ("report", "make_model"), ("fix", "--write")):
        assert any(line.endswith(ending) and len(line) > 80 for line in lines(shown[name], 80))
    told = [line for line in lines(shown["verify"], 80) if "nandoctor " in line]
    assert [line[line.index("nandoctor") :] for line in told] == [command, command]


def test_the_page_of_a_triage_fills_in_what_its_verdicts_mean():
    page = triage_page(factory_of_verbs.triage())
    assert "non-finite under autocast only; fp32 is finite" in page
    assert "{kinds}" not in page


def test_a_narrow_table_drops_columns_and_cuts_no_number():
    printed = "\n".join(lines(lambda console: print_checkup(factory_of_verbs.checkup(), console), 80))
    assert "-27.2" in printed
    assert "13.se" in printed
    assert "attention_" in "\n".join(lines(lambda console: print_triage(factory_of_verbs.triage(), console), 80))
