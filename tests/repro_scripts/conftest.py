"""Scripts are proved in this process: a fresh one for each takes seconds."""

import contextlib
import io

import pytest
import torch
from tiny_models import Eye

import nandoctor
from nandoctor.repro_scripts import build


def run_here(script):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, "repro.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        return repr(error)
    return None


@pytest.fixture(autouse=True, scope="module")
def proved_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run_afresh", run_here)
        yield


class Written(Eye):
    width = 4

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self.read(x))


@pytest.fixture
def script_of(tmp_path):
    """(function, x, **settings) -> the script of a step whose model is this function of what a layer gives."""

    def script_of(function, x, **settings):
        model = Written(function)
        torch.save({"state_dict": model.state_dict(), "x": x}, tmp_path / "dump.pth")
        return nandoctor.repro(tmp_path / "dump.pth", model=lambda: model, **settings)

    return script_of
