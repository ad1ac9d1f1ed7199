"""Names of modules and parameters may be a stranger's; in a snippet they are strings and nothing else."""

from __future__ import annotations

import ast

import pytest

from nandoctor.fixes.writing import _listed

NAMES = ['x"] + [open("canary", "w")]:#', "back\\slash", 'quote"', "line\nend", "\u202e\ud800", "blocks.0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_in_a_snippet_is_a_string(name):
    assert ast.literal_eval(_listed([name, "other"])) == [name, "other"]
