"""The line that an op is told by is the user's; what it is recorded to have read, where an edit changes it."""

import sys
from pathlib import Path

import pytest
import torch

from nandoctor.tracing import dispatch_hook
from nandoctor.tracing.dispatch_hook import find_lines, intercepting
from nandoctor.tracing.op_tracer import OpTracer

LAYER = "import torch\n\n\ndef forward(tensor):\n    return torch.exp(tensor)\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An installed library in a folder beside torch's, whose name starts with "torch"; and what it defines."""
    monkeypatch.setattr(dispatch_hook, "_SKIPPED_ROOTS", (f"{tmp_path / 'torch'}/", *dispatch_hook._SKIPPED_ROOTS))

    def install(package):
        path = tmp_path / package / "layer.py"
        path.parent.mkdir()
        path.write_text(LAYER)
        scope = {}
        exec(compile(LAYER, str(path), "exec"), scope)
        return path, scope["forward"]

    return install


def lines_of(forward):
    found, tensor = [], torch.ones(2)

    def note(call, proceed):
        line = find_lines(sys._getframe().f_back).source
        found.append((line.file, line.line))
        return proceed(call)

    with intercepting(note):
        forward(tensor)
    return found


@pytest.mark.parametrize("package", ["torchvision_like", "torch_geometric_like", "torchmetrics_like"])
def test_a_package_beside_torch_is_named(package, library):
    path, forward = library(package)
    assert lines_of(forward) == [(str(path), 5)]


def test_code_that_was_made_from_a_string_is_told_by_its_call(library):
    path, forward = library("generating_like")
    scope = {"forward": forward}
    exec("def compiled(tensor):\n    return tensor + 1", scope)
    assert lines_of(scope["compiled"])[0][0] == __file__
    exec("def compiled(tensor):\n    return forward(tensor)", scope)
    assert lines_of(scope["compiled"]) == [(str(path), 5)]


def test_the_folders_passed_over_end_with_a_separator():
    torch_folder = str(Path(torch.__file__).parent)
    assert not f"{torch_folder}vision/ops.py".startswith(dispatch_hook._SKIPPED_ROOTS)
    assert f"{torch_folder}/nn/functional.py".startswith(dispatch_hook._SKIPPED_ROOTS)
    assert all(Path(file).is_file() for file in dispatch_hook._RUNNERS)


@pytest.mark.parametrize(
    ("package", "name"),
    [("torch", "layer"), ("notation", "einops._backends"), ("notation", "einx.op"), ("notation", "opt_einsum")],
)
def test_torch_and_other_words_for_its_ops_are_passed_over(package, name, library):
    _, forward = library(package)
    forward.__globals__["__name__"] = name
    [(file, _)] = lines_of(forward)
    assert file == __file__


def widen(call, proceed):
    return proceed(call.mapped(lambda value: value.double() if isinstance(value, torch.Tensor) else value))


def clamp(call, proceed):
    given = dict(call.arguments())
    return proceed(call.with_argument("self", given["self"].clamp(max=1.0)))


@pytest.mark.parametrize("edit", [widen, clamp])
def test_operands_of_an_edited_op_keep_their_origin(edit):
    x = torch.tensor([1.0, float("inf")])
    tracer = OpTracer(known=[("batch", "x", x)])
    edited = intercepting(lambda call, proceed: edit(call, proceed) if call.name == "exp" else proceed(call))
    with edited, tracer.watching(lambda: ("", "", 0)):
        torch.exp(x * 2)
        torch.exp(x)
    doubled, of_doubled, of_input = tracer.calls()
    assert of_doubled.inputs[0].producer == doubled.order
    assert (of_input.inputs[0].origin, of_input.inputs[0].path) == ("batch", "x")


def test_operands_from_nowhere_stay_unknown():
    unknown, tracer = torch.ones(1), OpTracer(known=[])
    with intercepting(widen), tracer.watching(lambda: ("", "", 0)):
        torch.exp(unknown)
    (call,) = tracer.calls()
    assert call.inputs[0].origin == "unknown"
