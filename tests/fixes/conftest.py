"""Most fixes are tried in a project of one file."""

import pytest
from projects import Project


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of its own, in a place where git knows of no repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return Project()


@pytest.fixture
def replay_step(project):
    """(forward, arrays, **more) -> report; `more` are parts of the code (see `Project.write`) or options of the replay.

    The forward takes all arrays if `inputs` does not say which.
    """

    def replay_step(forward, arrays, *, inputs=None, layers="self.lift = nn.Linear(4, 4)", loss=None, **options):
        project.write(forward, inputs=inputs or ", ".join(arrays), layers=layers, loss=loss)
        project.save(**arrays)
        return project.replay(**options)

    return replay_step
