"""Changed source is run by every live function of its file, wherever it is held, and by none afterwards."""

import importlib
import sys
from types import FunctionType

import pytest
from torch import nn

from nandoctor.engine.printed_changes import CannotRunError, printed_changes
from nandoctor.evidence.edits import ChangedFile, SourcePatch

TEXT = """
def number():
    return 1

def make():
    def inner():
        return 1
    return inner
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "swapped.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("swapped")
    del sys.modules["swapped"]


def swapped(module, before, after):
    changed = ChangedFile(path=module.__file__, before=TEXT, after=TEXT.replace(before, after))
    return printed_changes([SourcePatch(root="/", files=(changed,))], nn.Linear(1, 1))


@pytest.mark.parametrize(
    "hold",
    [
        lambda module: module.number,
        lambda module: FunctionType(module.number.__code__, {}),
        lambda module: module.make(),
    ],
    ids=["in its module", "a second function with its code", "a closure that was made before"],
)
def test_every_function_of_the_file_runs_the_new_text(module, hold):
    held = [hold(module)]
    with swapped(module, "return 1", "return 2"):
        assert (held[0](), module.number(), module.make()()) == (2, 2, 2)
    assert (held[0](), module.number(), module.make()()) == (1, 1, 1)


def test_a_change_outside_of_functions_cannot_be_run(module):
    with (
        pytest.raises(CannotRunError, match="No function that is loaded"),
        swapped(module, "def number", "one = 1\n\ndef number"),
    ):
        pass
