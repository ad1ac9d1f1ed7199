"""What large models are spared changes no finding; the end of memory is told as that."""

import platform
import subprocess
import sys

import pytest
import torch
from sick_models import all_cases
from sick_models.judging import diagnose
from torch import nn

from nandoctor import file_memory
from nandoctor.case import replay
from nandoctor.engine import module_state
from nandoctor.errors import ModelError
from nandoctor.machine import is_out_of_memory
from nandoctor.step import setup as replay_setup
from nandoctor.step.model_loading import build_model

BACKWARD = [case for case in all_cases() if case.phase == "backward"][::5]


@pytest.fixture
def all_are_large(monkeypatch):
    def make():
        monkeypatch.setattr(replay_setup, "LARGE_NBYTES", 0)
        monkeypatch.setattr(replay_setup, "_UNFILLED_NBYTES", 0)
        monkeypatch.setattr(module_state, "LARGE_NBYTES", 0)
        monkeypatch.setattr(file_memory, "_LEAST_NBYTES", 0)

    return make


def told(report):
    return report.verdict, report.headline, report.origin, report.cause, report.bad_gradients


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_a_diagnosis_is_the_same(case, tmp_path, all_are_large):
    plain = told(diagnose(case, tmp_path))
    all_are_large()
    assert told(diagnose(case, tmp_path)) == plain


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 30)

    def forward(self, x):
        return (x @ self.weight) @ self.weight * 50


def loss(output, batch):
    return output.square().mean()


def test_fixes_are_the_same(tmp_path, all_are_large):
    torch.save({"state_dict": Tied().state_dict(), "x": torch.randn(4, 8)}, tmp_path / "dump.pth")
    options = {"model": Tied, "loss": loss, "max_trials": 30}
    plain = replay(tmp_path / "dump.pth", **options).report
    all_are_large()
    large = replay(tmp_path / "dump.pth", **options).report
    assert told(large) == told(plain)
    assert [(fix.title, fix.verified) for fix in large.fixes] == [(fix.title, fix.verified) for fix in plain.fixes]


FREED = """
import sys
import numpy as np
from nandoctor.machine import return_freed_memory

anonymous_memory = lambda: int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) << 10
return_freed_memory()
np.ones(16 << 20, "u1")
blocks = [np.ones(4 << 20, "u1") for _ in range(20)]
last, before = blocks.pop(), anonymous_memory()
blocks.clear()
print(before - anonymous_memory())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_returned():
    """Without the call the blocks below the last one stay with the process."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 19 * (4 << 20) * 0.9


HUGE = 1 << 40


def test_the_end_of_memory_does_not_blame_the_model():
    with pytest.raises(ModelError, match="There is not enough memory to build"):
        build_model(lambda: nn.Linear(HUGE, 1 << 20), {})
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes"))


def test_exceptions_that_came_from_each_other_have_an_end():
    first, second = RuntimeError("shapes"), ValueError("of a leaf")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
