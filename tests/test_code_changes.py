"""What is read to tell whether the code has changed: so much, whatever a dump names."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from nandoctor import verification
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.source_files import SourceHash, hash_of
from nandoctor.step.settings import Settings
from nandoctor.verification import Query, find_changes


@pytest.fixture
def project(here):
    for name in ("small.py", "last.py"):
        Path(name).write_text("#")
    return here


def changes(hashes, folder):
    sources = {name: SourceHash(sha256=sha256) for name, sha256 in hashes.items()}
    dump = SimpleNamespace(path=folder / "dump.pth", recorded=Recorded(sources=sources))
    step = SimpleNamespace(model=nn.Linear(2, 2), project=SimpleNamespace(files=lambda _: set()))
    return find_changes(Query(dump=dump, settings=Settings()), step)


def test_names_beyond_the_bound_make_no_file_a_new_one(project, monkeypatch):
    """The model's own file is named after thousands of others: it is not compared, and not told as changed."""
    monkeypatch.setattr(verification, "_files_of", lambda _: {project / "last.py"})
    others = {"small.py": hash_of(Path("small.py"))} | {f"{number}.py": "0" * 64 for number in range(2000)}
    found = changes({**others, "last.py": "0" * 64}, project)
    assert found.compared == ("small.py",)
    assert not found.changes


def test_a_file_that_the_training_did_not_have_is_a_change(project, monkeypatch):
    monkeypatch.setattr(verification, "_files_of", lambda _: {project / "last.py"})
    found = changes({"small.py": hash_of(Path("small.py"))}, project)
    assert [change.file for change in found.changes] == ["last.py"]
