"""The README's own commands, run; `UPDATE_README=1 python -m pytest tests/test_readme.py` writes what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CONSOLE = re.compile(r"```console\n\$ (?P<command>nandoctor [^\n]+)\n(?P<output>.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")


def run(command: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", check=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def without_digits(text: str) -> list[str]:
    """Other processors sum in another order: what is said must be the same, not its last digits."""
    return NUMBER.sub("#", re.sub("[█░]+", "", text)).split()


@pytest.mark.parametrize("block", CONSOLE.finditer(README.read_text(encoding="utf-8")), ids=lambda b: b["command"])
def test_command_prints_what_the_readme_shows(block):
    printed = run(block["command"])
    if os.environ.get("UPDATE_README"):
        text = README.read_text(encoding="utf-8")
        README.write_text(text.replace(block[0], f"```console\n$ {block['command']}\n{printed}```"), encoding="utf-8")
        return
    assert without_digits(printed) == without_digits(block["output"])


def test_setup_commands_are_two_and_ci_runs_them():
    section = README.read_text(encoding="utf-8").partition("## Set up")[2]
    commands = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1].splitlines()
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_file_the_readme_links_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_cause_of_the_catalogue_is_in_the_readme():
    codes = {
        re.search(r'^CODE = "([a-z-]+)"', path.read_text(), re.MULTILINE)[1]
        for path in (ROOT / "nandoctor" / "rules").glob("*.py")
        if "\nCODE = " in path.read_text()
    }
    text = README.read_text(encoding="utf-8")
    assert codes
    assert sorted(code for code in codes if f"`{code}`" not in text) == []
