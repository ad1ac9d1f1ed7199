"""docs/adding_a_cause.md, followed step by step: the cause that it adds is taken out of a copy and put in again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_cause.md"
BLOCK = re.compile(r'```python title="(?P<path>[^"]+)"\n(?P<code>.*?)```', re.DOTALL)
REGISTRY = "nandoctor/causes/registry.py"

ASK = """
import sys

from nandoctor.causes.registry import list_pages

sys.path.append("docs")
from report_schema import report_schema

CODE = "empty-reduction"
codes = [page.code for page in list_pages()]
print(CODE in codes)
print(CODE in report_schema()["$defs"]["Cause"]["properties"]["code"]["examples"])
print(codes.index(CODE) > codes.index("division-by-zero"))
"""


def blocks():
    return [(block["path"], block["code"]) for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


def module_block():
    return next((path, code) for path, code in blocks() if "/causes/empty" in path)


@pytest.fixture
def house(tmp_path):
    """The package without the cause that the page adds."""
    shutil.copytree(ROOT / "nandoctor", tmp_path / "nandoctor", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "report_schema.py", tmp_path / "docs")
    (tmp_path / "nandoctor" / "causes" / "empty_reduction.py").unlink()
    registry = tmp_path / REGISTRY
    registry.write_text(registry.read_text().replace("    empty_reduction,\n", ""))
    return tmp_path


def follow(house):
    """Do what the page says."""
    imports, places = (code for path, code in blocks() if path == REGISTRY)
    path, module = module_block()
    (house / path).write_text(module)
    head, tuple_start, tail = (house / REGISTRY).read_text().partition("CAUSES: ")
    head, tail = (
        part.replace(lines.splitlines(keepends=True)[0], lines) for part, lines in ((head, imports), (tail, places))
    )
    (house / REGISTRY).write_text(head + tuple_start + tail)


def python(house, *args):
    run = subprocess.run(
        [sys.executable, *args], cwd=house, env={**os.environ, "PYTHONPATH": str(house)}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    return run.stdout + run.stderr


def test_page_shows_the_module_as_it_is():
    path, code = module_block()
    real = (ROOT / path).read_text(encoding="utf-8")
    if os.environ.get("UPDATE_README"):
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text.replace(code, real), encoding="utf-8")
        code = real
    assert code == real


def test_page_shows_a_case_as_it_is():
    path, code = next((path, code) for path, code in blocks() if "sick_models" in path)
    assert code in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_following_the_page_adds_the_cause(house):
    assert "There is no cause" in python(house, "-m", "nandoctor", "explain", "empty-reduction")
    follow(house)
    assert "What it is" in python(house, "-m", "nandoctor", "explain", "empty-reduction")
    assert python(house, "-c", ASK).split() == ["True"] * 3
