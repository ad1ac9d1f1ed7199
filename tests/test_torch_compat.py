"""What is private in torch is used in one file, and where it is missing nandoctor says so and stops."""

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
from nandoctor import process_wide, torch_compat, torch_places
from nandoctor.engine.checkpoints import open_checkpoints
from nandoctor.errors import UnsupportedTorchError

PACKAGE = Path(nandoctor.__file__).parent
OTHERS = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "torch_compat.py"})
# Documented by Python: fields of named tuples and of an enum's members, the caller's frame, and the end of a process.
PUBLIC = frozenset({"_fields", "_replace", "_asdict", "_name_", "_value_", "_getframe", "_exit"})
# Private attributes of transformers' configurations and of argparse's parsers, which are no part of torch.
ELSEWHERE = frozenset({"_attn_implementation", "_actions"})


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


def test_the_installed_torch_has_everything(forget):
    torch_compat.check_torch()


@pytest.mark.parametrize(
    "place",
    [
        "torch._C._dispatch_keyset_full_after",
        "torch._C._jit_set_autocast_mode",
        "torch._C._functorch.get_unwrapped",
        "torch.library.Library._destroy",
        "torch.nn.Module._compiled_call_impl",
    ],
)
def test_what_is_missing_is_named_with_torchs_version(place, forget, monkeypatch):
    monkeypatch.delattr(place)
    with pytest.raises(UnsupportedTorchError, match=re.escape(f"torch {torch.__version__} lacks")) as caught:
        torch_compat.check_torch()
    assert f"{place} (for {torch_compat.NEEDED[place]})" in caught.value.message
    assert torch_compat.TESTED in caught.value.remedy


def test_a_replay_stops_before_it_blames_the_model(forget, monkeypatch):
    model = nn.Linear(2, 2)
    monkeypatch.delattr("torch._C._dispatch_keyset_full_after")
    with pytest.raises(UnsupportedTorchError, match="watching operations"), nandoctor.cuda_autocast():
        model(torch.ones(1, 2))


def test_a_place_that_is_not_listed_cannot_be_used():
    source = (PACKAGE / "torch_compat.py").read_text(encoding="utf-8")
    asked_for = set(re.findall(r'_find\("([\w.]+)"\)', source))
    assert asked_for <= set(torch_compat.NEEDED)


def test_the_version_that_is_named_as_tested_is_this_one():
    assert torch.__version__.startswith(f"{torch_compat.TESTED}.")


def enter_of_autocast():
    return vars(torch.amp.autocast_mode.autocast)["__enter__"]


def fail_while_patched():
    with process_wide.patched([process_wide.Patch(torch_places.AUTOCAST_ENTER, lambda enter: lambda *args: None)]):
        raise ZeroDivisionError


def test_patches_are_undone_where_the_block_raises():
    before = enter_of_autocast()
    with pytest.raises(ZeroDivisionError):
        fail_while_patched()
    assert enter_of_autocast() is before


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
