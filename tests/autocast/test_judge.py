"""Torch's own CUDA autocast, asked with fake tensors, gives the dtypes that the emulation gives."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nandoctor.evidence.formats import BF16, FP16

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
QUICK = ("attention by hand", "region in fp32", "region in bf16", "custom functions", "mixture density")
SLOW = (
    "encoder layer",
    "rotations",
    "spectrogram",
    "vector quantization",
    "depthwise, group norm, hardswish",
    "triplets",
)


@pytest.fixture
def bench(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import autocast_judge

    yield autocast_judge
    for name in ("autocast_judge", "autocast_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("low", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_no_dtype_differs_from_torchs_own(bench, name, low):
    verdicts = bench.judge(name, low)
    assert [str(verdict.ran.call.op) for verdict in verdicts if verdict.differs] == []
    assert sum(verdict.gives is not None for verdict in verdicts) >= 0.9 * len(verdicts) > 0


def test_another_dtype_is_told(bench):
    ran = next(ran for ran in bench.record("attention by hand", FP16) if ran.call.name == "softmax")
    assert ran.gave == (torch.float32,)
    assert not bench.ask(ran).differs
    assert bench.ask(replace(ran, gave=(torch.float16,))).differs
    assert bench.ask(replace(ran, enabled=False)).gives == (torch.float16,)
