"""Source files as trees, parsed once in a process for all the tests that read them: the package takes two seconds."""

import ast
from functools import cache


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path):
    """Every node of a file."""
    return list(ast.walk(parsed(path)))
