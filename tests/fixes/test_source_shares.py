"""What is made of powers, by the code alone: shares of their sum stay where the largest exponent is subtracted."""

import ast
import textwrap

import pytest

from nandoctor.changes.editor import Editor
from nandoctor.changes.shares import check_shares
from nandoctor.changes.source_tree import CannotWriteError, parse_source

SHARES = {
    "at once": "w = x.exp()\nreturn w / w.sum(-1, keepdim=True)",
    "cast and scaled": "w = 2 * x.exp().float()\nz = w.sum(dim=1)\nreturn w.to(x.dtype) / z[:, None]",
    "an average": "w = x.exp()\nreturn (w.unsqueeze(-1) * y).transpose(1, 2) @ v / torch.sum(w, dim=1)",
    "a name bound anew": "x = x.exp()\nx = x / x.sum(-1, keepdim=True)\nreturn x.log()",
    "a way of each": "w = x.exp()\nif y:\n    return w / w.sum(1)\nz = w.sum(1)\nreturn torch.matmul(w, v) / z",
    "sizes": "w = x.exp()\nprint(w.shape)\nreturn w / w.sum(1)",
}
OTHERS = {
    "an eps": "w = x.exp()\nreturn w / (w.sum(-1, keepdim=True) + 1e-8)",
    "a bound": "w = x.exp()\nreturn w / w.sum(-1, keepdim=True).clamp(min=1e-8)",
    "an eps later": "w = x.exp()\nz = w.sum(-1)\nz += 1e-8\nreturn w / z",
    "a way not run": "w = x.exp()\nif y:\n    return w\nreturn w / w.sum(-1, keepdim=True)",
    "kept": "w = x.exp()\nself.last = w\nreturn w / w.sum(-1, keepdim=True)",
    "written out": "w = x.exp()\nself.seen.copy_(w)\nreturn w / w.sum(-1, keepdim=True)",
    "a mask": "w = x.exp() * y\nreturn w / w.sum(-1, keepdim=True)",
    "squares": "w = x.exp()\nreturn w * w / w.sum(-1, keepdim=True)",
    "the reciprocal": "w = x.exp()\nreturn w / w.sum(-1), 1 / w.sum(-1)",
    "another sum": "w = x.exp()\nreturn y / w.sum(-1)",
    "of a sum": "w = x.exp()\nz = w.sum(-1)\nreturn w / z.sum(0)",
    "in another function": "w = x.exp()\nreturn (lambda: w)() / w.sum(-1)",
    "in a loop": "for step in y:\n    w = w / w.sum(-1) if step else 0\n    w = x.exp()\nreturn w",
    "by a branch": "w = x.exp()\nif y:\n    w = w * 2\nreturn w / w.sum(-1)",
    "nothing else": "return x.exp()",
}


def write(body, file):
    """The editor of a function with this body, and the powers in it."""
    tree = parse_source("import torch\n\n\ndef scores(self, x, y, v, t):\n" + textwrap.indent(body, " " * 4) + "\n")
    calls = (node for node in ast.walk(tree.module) if isinstance(node, ast.Call))
    return Editor(tree, file, library=None), next(node for node in calls if tree.code(node) == "x.exp()")


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_a_sum(name, tmp_path):
    check_shares(*write(SHARES[name], tmp_path / "net.py"))


@pytest.mark.parametrize("name", OTHERS)
def test_powers_that_go_elsewhere(name, tmp_path):
    with pytest.raises(CannotWriteError):
        check_shares(*write(OTHERS[name], tmp_path / "net.py"))
