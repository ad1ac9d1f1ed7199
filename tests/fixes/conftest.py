"""Most fixes are tried in a project of one file."""

import pytest
from projects import Project


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of its own, in a place where git knows of no repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return Project()
