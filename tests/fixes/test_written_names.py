"""Names of modules and parameters may be a stranger's; in a snippet they are strings and nothing else."""

from __future__ import annotations

import ast

import pytest
from torch import nn

from nandoctor.evidence.edits import KeepModule, Together
from nandoctor.fixes.writing import ChangeWriter

NAMES = ['x"] + [open("canary", "w")]:#', "back\\slash", 'quote"', "line\nend", "\u202e\ud800", "blocks.0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_in_a_snippet_is_a_string(name):
    edit = Together(edits=(KeepModule(module=name), KeepModule(module="other")))
    (written,) = ChangeWriter(nn.Identity(), None, ()).write(edit)
    (loop,) = (item for item in ast.parse(written.text).body if isinstance(item, ast.For))
    assert ast.literal_eval(loop.iter) == [name, "other"]
