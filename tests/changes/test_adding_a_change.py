"""docs/adding_a_change.md, followed: the kind of change that it makes up is one file, and all else follows from it."""

import importlib.util
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from report_schema import report_schema
from written import run_both

from nandoctor import changes
from nandoctor.evidence import edits
from nandoctor.evidence.codec import from_plain, to_plain
from nandoctor.evidence.edits import OpSite, Together, only_widens
from nandoctor.fixes.writing import write_title

SUGGESTED = """
from nandoctor import pipeline
from nandoctor.evidence import edits
print(*(kind.__name__ for kind in edits.KINDS.values()))
"""
PAGE = Path(__file__).parents[2] / "docs" / "adding_a_change.md"
BLOCK = re.compile(r'```python title="(?P<path>[^"]+)"\n(?P<code>.*?)```', re.DOTALL)


@pytest.fixture
def absolute(tmp_path, monkeypatch):
    """The page's kind of change, from its one file."""
    (block,) = BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    path = tmp_path / Path(block["path"]).name
    path.write_text(block["code"])
    spec = importlib.util.spec_from_file_location("absolute", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "absolute", module)
    spec.loader.exec_module(module)
    yield module.AbsoluteArgument
    del edits.KINDS["absolute"]


def test_it_is_written_and_run(absolute, tmp_path):
    x = torch.tensor([4.0, -9.0])
    make = lambda site: absolute(site=site, argument="self")  # noqa: E731
    lines, by_run, by_text = run_both("return torch.sqrt(x)", tmp_path, x, "sqrt", make)
    assert lines == ["return torch.sqrt(x.abs())"]
    assert by_run.tolist() == by_text.tolist() == [2.0, 3.0]


def test_it_is_named_and_kept_in_reports(absolute):
    edit = absolute(site=OpSite(module="", type="Net", op="sqrt"), argument="self")
    assert write_title(edit) == "Take the absolute value of the argument of sqrt"
    assert (edit.size, only_widens(edit)) == (3, False)
    both = Together(edits=(edit,))
    assert from_plain(Together, to_plain(both)) == both
    assert report_schema()["$defs"]["AbsoluteArgument"]["properties"]["kind"] == {"const": "absolute"}


def test_every_kind_that_is_shipped_is_suggested_by_somebody(tmp_path, ready_python):
    """Nobody lists the kinds: one that the search does not import is never tried."""
    (tmp_path / "suggested.py").write_text(SUGGESTED)
    suggested = ready_python.run(tmp_path / "suggested.py", cwd=tmp_path)
    modules = [import_module(f"nandoctor.changes.{found.name}") for found in pkgutil.iter_modules(changes.__path__)]
    shipped = {item for module in modules for item in vars(module).values() if is_kind(item, module)}
    assert {kind.__name__ for kind in shipped} == set(suggested.stdout.split())


def is_kind(item, module):
    return isinstance(item, type) and issubclass(item, edits.SingleEdit) and item.__module__ == module.__name__
