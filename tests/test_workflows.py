"""What runs elsewhere is well formed: the workflows of the repository's host, its issue templates, the commit hooks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
TOOLS = {"python", "uv", "ruff", "mypy", "lint-imports"}


def steps_of(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [(job, step) for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_can_be_read(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", True, "permissions", "jobs"} <= workflow.keys()  # YAML 1.1 reads `on` as true
    for job, step in steps_of(path):
        assert {"runs-on", "timeout-minutes"} <= job.keys()
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_tools_that_are_set_up(path):
    commands = [part for _, step in steps_of(path) for part in step.get("run", "").split("&&") if part.strip()]
    assert commands
    assert {shlex.split(command)[0] for command in commands} <= TOOLS


def test_every_supported_python_is_tested():
    required = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tested = [job["strategy"]["matrix"]["python"] for job, _ in steps_of(WORKFLOWS[0]) if "strategy" in job]
    assert all(f"3.{required[1]}" in versions and len(versions) > 1 for versions in tested)
    assert tested


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_says_what_it_is_for(path):
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    assert {"name", "about"} <= yaml.safe_load(front).keys()
    assert body.strip()


def test_commit_hooks_run_the_checks_of_the_workflow():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    names = {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]}
    assert any("ruff" in name for name in names)
    assert any("mypy" in name for name in names)
