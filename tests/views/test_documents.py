"""Documents on every surface; `UPDATE_GOLDEN=1 python -m pytest tests/views/test_documents.py` renews the texts."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import factory
import factory_of_verbs
import pytest
from private_words import find_words
from surfaces import LEVELS, SURFACES, letters, markdown, terminal, texts

from nandoctor.causes.registry import find_page, list_pages
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import from_plain
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.report import Report
from nandoctor.evidence.verification import FixChoice
from nandoctor.views.save import save

GOLDEN = Path(__file__).parent / "golden"
CHOICE = FixChoice(dump="NaN.pth", headline="It divides by 0", pick=1, num_verified=3, fix=factory.fixable().fixes[0])
VERBS = {
    "verify fixed": factory_of_verbs.verification("fixed"),
    "verify still-fails": factory_of_verbs.verification("still-fails"),
    "triage": factory_of_verbs.triage(),
    "inspect": factory.state().dump,
    "explain": find_page("eps-underflow"),
    "causes": list_pages(),
}
REPORTS = {name: make() for name, make in factory.VERDICTS.items()}
THINGS = {**REPORTS, **VERBS}
each_thing = pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS)
each_surface = pytest.mark.parametrize("surface", SURFACES)


@pytest.mark.parametrize("name", ["precision", "fixable", "not-reproduced", *VERBS])
def test_the_text_of_a_document(name):
    shown = f"{terminal(THINGS[name])}\n{'=' * 80}\n{markdown(THINGS[name])}"
    path = GOLDEN / f"{name.replace(' ', '_')}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@each_surface
@each_thing
def test_every_surface_says_all_that_the_document_has(surface, thing):
    wide = {"width": 1000} if surface == "terminal" else {}
    drawn = letters(SURFACES[surface](thing, **wide))
    limit = 20 if surface in ("terminal", "markdown") else 3000
    said = texts(factory.document(thing, LEVELS[surface]), limit)
    assert [text for text in said if letters(text) not in drawn] == []


@each_surface
@each_thing
def test_no_word_of_ours_is_said(surface, thing):
    assert find_words(SURFACES[surface](thing)) == []


@pytest.mark.parametrize("width", [80, 120])
@each_thing
def test_lines_fit_and_end_where_they_end(thing, width):
    printed = terminal(thing, width=width).splitlines()
    assert [line for line in printed if line != line.rstrip()] == []
    code = {line for fix in factory.fixable().fixes for line in fix.patch.splitlines()}
    assert [line for line in printed if len(line) > width and line not in code and "nandoctor " not in line] == []
    assert "\x1b" not in "".join(printed)


@each_thing
def test_tables_fit_a_narrow_window(thing):
    """Names are cut and columns left out; no row is broken."""
    drawn = terminal(thing, width=40).splitlines()
    commands = [line for line in drawn if "nandoctor " in line or " | " in line or line.startswith(("-", "+", "@"))]
    assert [line for line in drawn if len(line) > 40 and line not in commands] == []


@each_surface
def test_cause_line_and_fix_come_first_in_this_order(surface):
    report = factory.fixable()
    first = "\n".join(SURFACES[surface](report).splitlines()[: 25 if surface == "terminal" else 40])
    parts = (
        report.headline,
        "net.py:45",
        "^^^^^^^^^^^^^^^ 1e-8 is 0 in fp16",
        "fp32 is finite",
        "reproduces your run",
        "+ return x / torch.sqrt(variance + 1e-5)",
        "nandoctor fix NaN.pth --model net.py:Net --write",
        "gradients finite",
    )
    places = [first.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


@each_surface
def test_where_nothing_was_found_every_surface_says_why(surface):
    show = SURFACES[surface]
    none = replace(factory.precision(), search_notes=("No change was found to try.",))
    told = show(none)
    assert told.index("No fix was found") < told.index("No change was found to try.")
    tried = replace(factory.fixable(), fixes=factory.fixable().fixes[-1:], search_notes=("The step is as before.",))
    told = show(tried)
    assert "No fix was verified" in told
    assert told.count("The step is as before.") == (2 if surface == "page" else 1)  # as Markdown on the page
    solved = replace(factory.fixable(), search_notes=("The budget was spent.",))
    assert "The budget was spent." in show(solved)
    assert "No fix was" not in show(solved)


@each_surface
def test_a_patch_cannot_move_the_cursor(surface):
    made = factory.fixable()
    patched = replace(made.fixes[0], title="\x1b[2J", patch="\tx\x1b[2J\r\ny\u202e")
    text = SURFACES[surface](replace(made, fixes=(patched,)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\tx\\x1b[2J\n" in text


NET = "class Norm:\n\tdef forward(self, x):\n\t\t# centred\n\n\t\treturn x / (x.std() + 1e-8)\n\n\nx = 1\n"
FILES = {
    "tabs": (NET, NET.replace("1e-8", "1e-4")),
    "first line": ("x = 1\n" * 9, "x = 2\n" + "x = 1\n" * 8),
    "last line": ("x = 1\n" * 9, "x = 1\n" * 8 + "x = 2\n"),
    "no newline": ("x = 1\n" * 8 + "y", "x = 1\n" * 7 + "x = 2\nz"),
    "two hunks": ("x = 1\n" * 30, "x = 1\n" * 5 + "y\n" + "x = 1\n" * 18 + "z\n" + "x = 1\n" * 4),
    "like a header": ("a\nb\n-- x\n" + NET, "a\nb\n" + NET),
}


@pytest.mark.parametrize(("before", "after"), FILES.values(), ids=FILES)
def test_a_diff_on_the_screen_can_be_pasted(before, after, tmp_path):
    (tmp_path / "net.py").write_text(before)
    file = ChangedFile(path=str(tmp_path / "net.py"), before=before, after=after)
    patch = SourcePatch(root=str(tmp_path), files=(file,))
    made = factory.fixable()
    fix = replace(made.fixes[0], patch=patch.diff(), patch_root=patch.root, files=patch.files)
    screen = terminal(replace(made, fixes=(fix,)))
    subprocess.run(["git", "apply", "-"], input=screen, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "net.py").read_text() == after


def test_a_command_to_type_is_never_broken():
    command = f"nandoctor verify {'runs/a-long-name/' * 4}nan-step000012.pth --model train.py:make_model"
    steps = (f"Confirm: {command}", command, "Name the file that you changed: --changed FILE")
    shown = [
        terminal(replace(factory_of_verbs.verification("cannot-tell"), next_steps=steps)),
        terminal(replace(factory.healthy(), next_steps=steps)),
    ]
    for text in shown:
        told = [line for line in text.splitlines() if "nandoctor " in line]
        assert [line[line.index("nandoctor") :] for line in told] == [command, command]
    long = replace(factory.fixable(), arguments=tuple(command.split()[2:]))
    drawn = terminal(CHOICE, more={"report": long}).splitlines()
    assert any(line.endswith("make_model --write") and len(line) > 80 for line in drawn)


def test_colour_only_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in terminal(factory.precision(), force_terminal=True, color_system="standard")
    assert "\x1b[36m" in terminal(find_page("eps-underflow"), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", terminal(factory.precision(), force_terminal=True))


def test_every_kind_of_nonfinite_value_is_counted():
    mixed = replace(factory.array("x", 1), num_posinf=2, num_neginf=3)
    assert "1 NaN, 2 +Inf, 3 -Inf" in terminal(factory.dump(arrays=(mixed,)))


def test_notes_and_what_is_missing():
    text = terminal(factory.dump(missing=("No input is saved: add it.",), notes=("EMA weights left aside.",)))
    assert "missing       No input is saved: add it." in text
    assert "note          EMA weights left aside." in text


def test_what_is_printed_is_bounded_whatever_the_file_holds():
    many = [f"{index:03d}" + "x" * 500 for index in range(400)]
    arrays = tuple(factory.array(name) for name in many)
    scalars, texts = tuple((name, name) for name in many), tuple(many)
    text = terminal(factory.dump(arrays=arrays, bad_weights=arrays, scalars=scalars, notes=texts, missing=texts))
    assert len(text) < 40_000
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("Rows 1 to 20 of 400.") == 1
    assert "and 397 more" in " ".join(text.split())
    assert "and 380 more" in text
    assert "and 780 more" in text


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "report.json"
    save(factory.precision(), path)
    return path


def read(path):
    """The report as another program reads it."""
    return from_plain(Report, json.loads(path.read_bytes()))


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_a_report_comes_back_as_it_was(make, tmp_path):
    report = make()
    save(report, tmp_path / "report.json")
    assert read(tmp_path / "report.json") == report


def test_a_failed_write_leaves_the_old_report(saved, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(NanDoctorError, match=r"cannot be written .* No space left"):
        save(factory.healthy(), saved)
    assert read(saved).verdict == "precision"
    assert len(list(saved.parent.iterdir())) == 1


def test_writing_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(NanDoctorError, match="There is no folder"):
        save(factory.healthy(), tmp_path / "missing" / "report.json")
