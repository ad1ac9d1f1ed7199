"""Where a number that a module keeps comes from: the comment below the lines that set it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch import nn

from nandoctor.changes.constant import SetAttribute


class Norm(nn.Module):
    def __init__(self, width, eps=1e-9, *, floor: float = 1e-12, scale=2.0):
        super().__init__()
        self.eps, self.floor, self.gain, self.scale = eps, floor, 1e-10, scale
        self.cut = 1e-7


class Inheriting(Norm):
    pass


LINE = inspect.getsourcelines(Norm.__init__)[1]
HERE = f"(its default is in line {LINE} of {Path(__file__).name})"


def comment(model, name, was):
    edit = SetAttribute(type=type(model).__name__, name=name, was=was, value=1e-4)
    return edit.snippet(nn.Sequential(nn.ReLU(), model)).text.partition(f"module.{name} = 1e-4\n")[2]


@pytest.mark.parametrize(
    ("model", "name", "was", "said"),
    [
        (Norm(3), "eps", 1e-9, f"Norm with eps=1e-4 {HERE}"),
        (Norm(3), "floor", 1e-12, f"Norm with floor=1e-4 {HERE}"),
        (Inheriting(3), "eps", 1e-9, f"Inheriting with eps=1e-4 {HERE}"),
        (Norm(3, eps=1e-8), "eps", 1e-8, "Norm with eps=1e-4"),
        (nn.LayerNorm(3, eps=1e-12), "eps", 1e-12, "LayerNorm with eps=1e-4"),
        (nn.LayerNorm(3), "eps", 1e-5, "LayerNorm with eps=1e-4"),
    ],
)
def test_an_argument_of_the_class_is_named(model, name, was, said):
    assert comment(model, name, was) == f"# To keep the change, build {said}.\n"


def test_a_number_that_is_no_argument_is_not():
    assert comment(Norm(3), "cut", 1e-7) == ""


def test_a_class_that_takes_anything_is_not_asked():
    class Open(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.eps = options.get("eps", 1e-9)

    assert comment(Open(), "eps", 1e-9) == ""
