"""The sample dumps: each replay says what the script that made the dump documents, and each script makes it again."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nandoctor

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "sample_dumps").glob("*.py"), key=lambda script: script.name)
WEIGHTS_ONLY = ROOT / "sample_dumps" / "weights_only.py"
REPLAYABLE = [script for script in SCRIPTS if script != WEIGHTS_ONLY]
UNSEEDED = {".rng.numpy.keys", ".rng.python.words"}
"""The recorder saves every generator; the scripts seed torch's, the only one that they draw from."""

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
each_replayable = pytest.mark.parametrize("script", REPLAYABLE, ids=lambda script: script.stem)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """The models come from the `[tool.nandoctor]` table of this repository's pyproject.toml."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


def read_script(script):
    """The script's names; it is imported, so this also says that importing it does not train."""
    return runpy.run_path(str(script))


def read_dump(path):
    """The tensors of the file as its script saved it, by where they are; the recorder's tells of its run besides."""
    return dict(tensors_in(torch.load(path, weights_only=False), ""))


def tensors_in(value, name):
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield name, torch.as_tensor(value)


def what_is_said(report):
    """The report in the words of a script's EXPECTED."""
    first, origin = report.first_nonfinite, report.origin
    shown = origin if first is None else first  # without one, the forward is finite
    return {
        "verdict": report.verdict,
        "module": shown.place.module,
        "type": shown.place.type,
        "call": shown.place.call,
        "where": origin.phase if first is None else first.where,
        "samples": shown.elements.samples,
        "op": origin.op,
        "cause": report.cause.code,
        "mode": "train" if report.runs.autocast.training else "eval",
    }


def test_every_script_has_its_dump_and_every_dump_its_script():
    dumps = {path.stem for path in (ROOT / "sample_dumps").glob("*.pth")}
    assert dumps == {script.stem for script in SCRIPTS}
    assert len(SCRIPTS) == 7


@each_replayable
def test_replay_says_what_the_script_documents(script, sample_reports):
    assert what_is_said(sample_reports[script.stem]) == read_script(script)["EXPECTED"]


def test_poisoned_buffers_are_sound_in_train_mode():
    case = nandoctor.replay("sample_dumps/poisoned_buffers.pth", mode="train", fixes=False)
    assert case.verdict == "not-reproduced"


def test_weights_alone_are_judged_by_themselves(sample_reports):
    report, expected = sample_reports[WEIGHTS_ONLY.stem], read_script(WEIGHTS_ONLY)["EXPECTED"]
    assert report.verdict == expected["verdict"]
    assert tuple(array.name for array in report.dump.bad_weights) == expected["weights"]
    assert report.runs is None


@pytest.mark.slow
@each_script
def test_script_dies_again_and_leaves_the_same_tensors(script, tmp_path, ready_python):
    again, step = regenerate(ready_python, script, tmp_path / "again.pth")
    kept = read_dump(script.with_suffix(".pth"))
    ours, theirs = ({(name, t.shape, t.dtype) for name, t in tensors.items()} for tensors in (again, kept))
    assert ours == theirs
    if sums_as_when_made():
        assert step in read_script(script)["__doc__"]
    else:
        kept, _ = regenerate(ready_python, script, tmp_path / "once_more.pth")
    assert {name for name in kept if not same_values(again[name], kept[name])} <= UNSEEDED


def regenerate(python, script, path):
    """The dump that the script writes, and the step at which it died: "step 37"."""
    done = python.run(script, "-o", path, cwd=ROOT)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("FloatingPointError")
    return read_dump(path), re.search(r"step \d+", last_line)[0]


def sums_as_when_made():
    """Whether torch adds up in the order in which it did when the dumps were made; other kernels have other orders."""
    return torch.__version__.startswith("2.13.") and torch.backends.cpu.get_cpu_capability() == "AVX2"


def same_values(left, right):
    return np.array_equal(left.numpy(), right.numpy(), equal_nan=left.is_floating_point())
