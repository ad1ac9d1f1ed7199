"""docs/causes: each page is made from its cause and two programs; the failing one fails so, the fixed one is healthy.

`python docs/cause_pages.py` writes the pages.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import cause_pages
import pytest

import nandoctor
from nandoctor.causes.registry import list_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CODES = [page.code for page in list_pages()]
each_cause = pytest.mark.parametrize("code", CODES)


def test_every_page_is_made_from_its_cause_and_programs():
    for name, text in cause_pages.documents().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "python docs/cause_pages.py"
    assert {path.stem for path in (DOCS / "causes").glob("*.md")} == set(CODES)


def test_the_readme_counts_the_causes():
    assert f"[{len(list_pages())} causes](docs/causes.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@each_cause
def test_programs_are_short_and_differ_in_few_lines(code):
    failing, fixed = (cause_pages.without_docstring(cause_pages.program(code, name)) for name in ("failing", "fixed"))
    assert len(failing) <= 40
    assert 1 <= len(set(fixed) ^ set(failing)) <= 7


@pytest.fixture
def replayed(here):
    """Runs a program in a folder of its own, and replays the step that it wrote."""

    def run(code, name):
        file = shutil.copy(DOCS / "causes" / code / f"{name}.py", here)
        # A recorder names its model's file, which is the program that Python began with.
        if "Recorder" in cause_pages.program(code, name):
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, file], check=True, cwd=here, env=environment)
        else:
            runpy.run_path(file, run_name="__main__")
        (step,) = here.rglob("*.pth")
        options = cause_pages.replay_options(Path(file).read_text(encoding="utf-8"))
        given = {key: value.format(file=file) for key, value in options.items()}
        return nandoctor.replay(step, fixes=False, **given).report

    return run


@pytest.mark.slow
@each_cause
def test_the_failing_program_is_diagnosed_with_its_cause(code, replayed):
    report = replayed(code, "failing")
    assert report.cause is not None
    assert report.cause.code == code


@pytest.mark.slow
@each_cause
def test_the_fixed_program_is_healthy(code, replayed):
    assert replayed(code, "fixed").verdict == "healthy"
