"""What to change where a module is built: the comment below the lines that set a number that it keeps."""

import pytest
from torch import nn

from nandoctor.changes.constant import SetAttribute


class Norm(nn.Module):
    def __init__(self, width, eps=1e-9, **options):
        super().__init__()
        self.eps, self.cut = eps, 1e-7


@pytest.mark.parametrize(
    ("model", "name", "was", "said"),
    [
        (Norm(3), "eps", 1e-9, "# To keep the change, build Norm with eps=1e-4.\n"),
        (nn.LayerNorm(3), "eps", 1e-5, "# To keep the change, build LayerNorm with eps=1e-4.\n"),
        (Norm(3), "cut", 1e-7, ""),
    ],
)
def test_an_argument_of_the_class_is_named(model, name, was, said):
    edit = SetAttribute(type=type(model).__name__, name=name, was=was, value=1e-4)
    text = edit.snippet(nn.Sequential(nn.ReLU(), model)).text
    assert text.partition(f"module.{name} = 1e-4\n")[2] == said
