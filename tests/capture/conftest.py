"""Each training runs in this folder: a recorder hashes the files of the working directory that are loaded."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
