"""What is in the way of a replay is told before anything is built."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.errors import NanDoctorError


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Counted(nn.Linear):
    """Counts how often it is built."""

    built = 0

    def __init__(self):
        super().__init__(3, 2)
        Counted.built += 1


@pytest.fixture
def dump(tmp_path):
    torch.save({"state_dict": nn.Linear(3, 2).state_dict(), "x": torch.ones(4, 3)}, tmp_path / "dump.pth")
    Counted.built = 0
    return tmp_path / "dump.pth"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (torch.inference_mode, r"inference_mode\(\) is on"),
        (lambda: torch.device("meta"), "on the device 'meta', where they hold no numbers"),
        (lambda: default_device("meta"), "on the device 'meta'"),
    ],
    ids=["inference mode", "device context", "default device"],
)
def test_modes_without_real_tensors_are_refused(dump, mode, said):
    for replay in (nandoctor.replay, nandoctor.verify, nandoctor.repro):
        with mode(), pytest.raises(NanDoctorError, match=said):
            replay(dump, Counted)
    assert Counted.built == 0
    assert nandoctor.replay(dump, Counted).verdict == "healthy"


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.device("cpu"), lambda: default_device("cpu")])
def test_modes_with_real_tensors_are_none_of_our_business(dump, mode):
    with mode():
        assert nandoctor.replay(dump, Counted, fixes=False).verdict == "healthy"
