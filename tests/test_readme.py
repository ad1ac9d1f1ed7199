"""The commands of README and docs, run; `UPDATE_README=1 python -m pytest tests/test_readme.py` writes what they print.

In ```console blocks the line after `$ ` is run and what it prints is compared; in ```bash blocks every line that starts
with `nandoctor` is run. Each document is worked through in order, in a folder of its own.
"""

import dataclasses
import html
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from one_test import for_each
from wording import words

import nandoctor
from nandoctor.cli import main
from nandoctor.evidence.report import Report
from nandoctor.step.settings import OPTIONS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(?P<kind>console|bash)\n(?P<body>.*?)```", re.DOTALL)
TRAIN = """
import sys
sys.path.insert(0, "sample_dumps")
from unet_blank_tile import UNet as make_model

def loss(output, batch):
    return output["logit"].float().mean()
"""


@pytest.fixture
def workplace(tmp_path):
    """The samples with this project's settings, somebody's training script and dump, and the tutorial's files."""
    shutil.copytree(ROOT / "sample_dumps", tmp_path / "sample_dumps", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    shutil.copy(ROOT / "sample_dumps" / "unet_blank_tile.pth", tmp_path / "model_fold0_0042_nan.pth")
    shutil.copy(ROOT / "sample_dumps" / "unet_blank_tile.pth", tmp_path / "checkpoint.pt")
    return tmp_path


@pytest.fixture
def run(run_nandoctor, workplace):
    """Runs a command of a document: what comes on standard output and standard error, and the exit code."""

    def run_one(command):
        if re.match(r"nandoctor [^|&<>*$;`#]*(#|$)", command):
            _, *arguments = shlex.split(command, comments=True)
            done = run_nandoctor(*arguments, cwd=workplace, environment={"COLUMNS": "80"}, merged=True)
        else:
            done = run_in_shell(command, workplace)
        return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n", done.returncode

    return run_one


def run_in_shell(command, folder):
    """Any command; its `nandoctor` is this one."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "nandoctor"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nandoctor "$@"\n')
    script.chmod(0o755)
    places = [str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)}
    environment |= {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "Agg"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", check=False,
    )  # fmt: skip


MANY_COMMANDS = ("README.md", "tutorial.md", "index.md", "recipes.md", "fixing.md", "report.md")


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.name in MANY_COMMANDS), id=path.name) for path in DOCUMENTS],
)
def test_commands_print_what_the_document_shows(document, workplace, run):
    text = document.read_text(encoding="utf-8")
    if document.stem == "tutorial":
        shutil.copytree(ROOT / "docs" / "tutorial", workplace, dirs_exist_ok=True)
    for block in BLOCK.finditer(text):
        if block["kind"] == "bash":
            run_each(block["body"], run)
            continue
        command, _, shown = block["body"].removeprefix("$ ").partition("\n")
        printed, _ = run(command)
        if os.environ.get("UPDATE_README"):
            now = document.read_text(encoding="utf-8")
            document.write_text(now.replace(block[0], f"```console\n$ {command}\n{printed}```"), encoding="utf-8")
        else:
            assert words(printed) == words(shown), command


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixing", "gpu", "report", "triage"])
def test_python_of_the_document_runs(name, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    script = (ROOT / "docs" / "tutorial" / "train.py").read_text(encoding="utf-8") + "\nmake_model = Net\n"
    (workplace / "train.py").write_text(script)
    with pytest.raises(SystemExit, match="non-finite output"):
        runpy.run_path("train.py", run_name="__main__")
    names = {"nandoctor": nandoctor, **runpy.run_path("train.py")}
    weights = {"state_dict": names["Net"]().state_dict()}
    torch.save(weights, "step9000.pth")
    torch.save(names["make_batch"](0), "batch.pth")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)  # the document's own code


def letters(text):
    """The text without its spaces, each number as #: where a line is broken makes no difference."""
    return "".join(words(text))


def without_context(text):
    """The letters around a patch, and its changed lines: its context is shorter on a screen than in a saved report."""
    before, _, rest = text.partition("--- a/")
    _, _, after = rest.partition("apply it")
    return letters(before), [letters(line) for line in re.findall(r"[-+] +return [^\n]*?1e-\d\)", rest)], letters(after)


def test_the_picture_is_what_the_first_sample_prints():
    """Without a run: tests/test_golden.py compares the same text with what is printed today."""
    drawn = re.findall(r"<text [^>]*>([^<]*)</text>", (ROOT / "docs" / "terminal.svg").read_text(encoding="utf-8"))
    printed = (ROOT / "tests" / "golden" / "unet_blank_tile.txt").read_text(encoding="utf-8")
    answer_and_fix = printed[: printed.index("\n\n", printed.index("apply it"))]
    title, *lines = [html.unescape(piece).replace("\xa0", " ") for piece in drawn]
    assert title == "nandoctor replay sample_dumps/unet_blank_tile.pth"
    assert without_context("".join(lines)) == without_context(answer_and_fix)


def run_each(body, run):
    """Every command of ours works: none fails by an error, though a check may say no."""
    for command in body.splitlines():
        if command.startswith("nandoctor "):
            printed, code = run(command)
            assert code in (0, 1, 3), (command, printed)
            assert "Traceback" not in printed, (command, printed)
            assert "nandoctor: " not in printed, (command, printed)


def options_markdown():
    """All settings as a table in Markdown."""
    lines = ["| command line | what it does | Python, pyproject.toml | holds |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        metavar = option.metavar.replace("|", "/") or "/".join(option.choices)
        flag = f"{option.flag} {metavar}".rstrip()
        lines.append(f"| `{flag}` | {option.help} | `{name}` | {option.holds} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_options_is_made_from_the_settings():
    path = ROOT / "docs" / "options.md"
    if os.environ.get("UPDATE_README"):
        text = re.sub(
            r"(TABLE|\| command line(.|\n)*?)\n(?=`replay` takes)",
            lambda _: options_markdown() + "\n",
            path.read_text(),
        )
        path.write_text(text, encoding="utf-8")
    assert options_markdown() in path.read_text(encoding="utf-8")


def test_every_option_of_every_command_is_in_the_page():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    shown = (param for command in commands for param in command.params if not getattr(param, "hidden", False))
    options = {option for param in shown for option in param.opts}
    flags = sorted(option for option in options if option.startswith("-"))
    assert len(flags) > 20
    assert [flag for flag in flags if not re.search(rf"`{flag}[ `]", text)] == []


def test_every_part_of_a_report_is_in_its_page():
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert [item.name for item in dataclasses.fields(Report) if f"`{item.name}`" not in text] == ["schema"]


@for_each(DOCUMENTS)
def test_every_file_that_is_linked_to_is_there(document):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_document_can_be_reached_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([\w.]+)\)", README.read_text(encoding="utf-8")))
    assert {path.name for path in DOCUMENTS[1:]} <= linked
