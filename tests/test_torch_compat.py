"""What is private in torch is used in one file; where it is missing, or torch is too old, nandoctor stops."""

import ast
import re
import threading
from pathlib import Path

import pytest
import torch
from one_test import for_each
from parsed_files import nodes_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor import torch_compat
from nandoctor.engine.runner import open_checkpoints
from nandoctor.errors import UnsupportedTorchError

PACKAGE = Path(nandoctor.__file__).parent
OTHERS = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "torch_compat.py"})
# Documented by Python: fields of named tuples and of an enum's members, the caller's frame, and the end of a process.
PUBLIC = frozenset({"_fields", "_replace", "_asdict", "_name_", "_value_", "_getframe", "_exit"})
# Private in transformers' configurations and argparse's parsers, and how zipfile finds the end of an archive: another
# reader could find another. None of it is a part of torch.
ELSEWHERE = frozenset({"_attn_implementation", "_actions", "_EndRecData", "_ECD_SIZE"})


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(nodes):
    """The private names that a file defines itself: attributes that its classes set, methods and functions."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def foreign_names(path):
    nodes = nodes_of(path)
    own = {*own_names(nodes), *PUBLIC, *ELSEWHERE}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nandoctor"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))


@for_each(OTHERS)
def test_nothing_private_outside_torch_compat(path):
    assert list(foreign_names(path)) == []


@pytest.fixture
def forget():
    """Look for every place again, before and after the test."""
    torch_compat._find.cache_clear()
    yield
    torch_compat._find.cache_clear()


def test_what_is_missing_is_named_and_not_laid_on_the_model(replay, forget, monkeypatch):
    monkeypatch.delattr("torch._C._ExcludeDispatchKeyGuard")
    with pytest.raises(UnsupportedTorchError, match=re.escape(f"torch {torch.__version__} lacks torch._C._Exc")) as it:
        replay(nn.Linear(2, 2), {"x": torch.ones(1, 2)}, amp_dtype="float16")
    assert "docs/versions.md" in it.value.remedy


def test_a_replay_with_an_older_torch_says_where_to_go(replay, monkeypatch):
    monkeypatch.setattr(torch_compat, "TORCH", (2, 5))
    with pytest.raises(UnsupportedTorchError, match=r"needs torch 2\.6 or newer") as caught:
        replay(nn.Linear(2, 2), {"x": torch.ones(1, 2)})
    assert "Copy the dump to an environment with a newer torch" in caught.value.remedy


def is_checkpointed():
    kinds = []

    def block(tensor):
        kinds.append(torch.is_grad_enabled())  # a reentrant checkpoint runs its block without a graph
        return tensor * 2

    checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=True)
    return kinds == [False]


def test_checkpoints_of_other_threads_stay_checkpoints():
    seen = []
    with open_checkpoints():
        thread = threading.Thread(target=lambda: seen.append(is_checkpointed()))
        thread.start()
        thread.join()
        assert not is_checkpointed()
    assert seen == [True]
    assert is_checkpointed()
