"""CUDA autocast's op lists: those of each torch version, and what CUDA computes otherwise than a CPU beside them.

`cuda_op_lists.json` has them by `aten` names with overload: those of torch 2.4, what later versions changed, and what
is on no list. `tests/autocast/test_op_lists.py` compares them with the installed torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from nandoctor.torch_compat import TORCH, minor_version

_DATA = json.loads(Path(__file__).with_name("cuda_op_lists.json").read_text(encoding="utf-8"))
CHANGED = frozenset(op for change in _DATA["changes"] for op in (*change.get("added", ()), *change.get("removed", ())))
"""The ops that not all versions list."""


@cache
def lists_of(version: tuple[int, int]) -> Mapping[str, frozenset[str]]:
    """Return the ops of each list of a torch version; of the nearest known one for others."""
    lists = {name: set(listed["ops"]) for name, listed in _DATA["lists"].items()}
    for change in _DATA["changes"]:
        if (minor_version(change["since"]) or version) <= version:
            lists[change["list"]] -= set(change.get("removed", ()))
            lists[change["list"]] |= set(change.get("added", ()))
    return {name: frozenset(ops) for name, ops in lists.items()}


@cache
def listed(version: tuple[int, int] = TORCH) -> frozenset[str]:
    """Return the ops of all lists of a torch version."""
    return frozenset[str]().union(*lists_of(version).values())


def ever_listed(name: str) -> list[str]:
    """Return the ops that a list has in any version, or one of those beside torch's."""
    changed = [op for change in _DATA["changes"] if change["list"] == name for op in change.get("added", ())]
    return [*{**_DATA["lists"], **_DATA["beside"]}[name]["ops"], *changed]


def describe_lists(version: str) -> str:
    """Return a sentence on whose lists a replay follows, "" if this torch has the same."""
    then = minor_version(version)
    if then is None or lists_of(then) == lists_of(TORCH):
        return ""
    return f"Autocast casts the operations that torch {then[0]}.{then[1]} lists."
