"""Texts that a file had in git before.

In: a file, and when or with which hash. Out: its bytes at that commit; None where there is no such commit, or no git.
"""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from pathlib import Path

_GIT_SECONDS = 10
_MAX_COMMITS = 50


def text_at(path: Path, time_ns: int, *, any_branch: bool) -> bytes | None:
    """The file as the last commit before that time has it, of what is checked out or of `any_branch`."""
    before = datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.UTC).isoformat()
    commits = _commits(path, f"--before={before}", "-1", *(["--all"] if any_branch else []))
    return _show(path, commits[0]) if commits else None


def text_with_hash(path: Path, sha256: str) -> bytes | None:
    """The file as it was in one of the last commits of what is checked out, with that sha256."""
    texts = (_show(path, commit) for commit in _commits(path, f"-{_MAX_COMMITS}"))
    return next((text for text in texts if text is not None and hashlib.sha256(text).hexdigest() == sha256), None)


def _commits(path: Path, *which: str) -> list[str]:
    """The commits that changed the file, the last one first."""
    listed = _git(path.parent, "log", *which, "--format=%H", "--", path.name)
    return listed.decode("ascii").split() if listed else []


def _show(path: Path, commit: str) -> bytes | None:
    return _git(path.parent, "show", f"{commit}:./{path.name}")


def _git(folder: Path, *arguments: str) -> bytes | None:
    # Nothing that a repository's own configuration names is to be started.
    harmless = ["-c", "core.fsmonitor=false", "-c", "log.showSignature=false"]
    command = ["git", "-C", str(folder), *harmless, "--no-pager", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
