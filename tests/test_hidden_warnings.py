"""What the replayed code warns of stays off the screen of a command, unless somebody asks for it."""

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch

from nandoctor.hidden_warnings import warnings_hidden

NET = """
import warnings
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        warnings.warn("degrees of freedom")
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "asked", "shown"), [("replay", "default", True), ("replay", "", False), ("triage", "", False)]
)
def test_a_command_shows_no_warnings_of_the_code(tmp_path, verb, asked, shown):
    (tmp_path / "net.py").write_text(NET)
    torch.save(
        {"state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "x": torch.ones(2)}, tmp_path / "d.pth"
    )
    command = [sys.executable, "-m", "nandoctor", verb, "d.pth", "--model", "net.py:Net"]
    command += ["--model-arg", "in_features=2", "--model-arg", "out_features=2", "--no-fixes"]
    environment = {**os.environ, "PYTHONWARNINGS": asked}
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 3)
    assert ("degrees of freedom" in done.stderr) == shown


def test_a_warning_that_is_an_error_stays_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with warnings_hidden(), pytest.raises(UserWarning):
            warnings.warn("...", stacklevel=1)


def test_filters_are_put_back():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for context in (warnings_hidden(), nullcontext()):
            with context:
                warnings.warn("...", stacklevel=1)
    assert len(caught) == 1
