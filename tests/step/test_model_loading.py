"""Finding, building and loading a model: what works, and what is said where it does not."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.engine.user_code import Project
from nandoctor.errors import ModelError
from nandoctor.step.model_loading import Unfilled, build_model, find_attribute, load_state
from nandoctor.step.weights import _prefixes, fit_state


@pytest.fixture(autouse=True)
def imports_are_restored(tmp_path):
    """What a model's file imports and puts on the path is gone after each test."""
    path = list(sys.path)
    yield
    assert sys.path == path
    files = (getattr(module, "__file__", None) or "" for module in sys.modules.values())
    assert not [file for file in files if str(file).startswith(str(tmp_path))]


MODEL_FILE = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width=3, *, bias=True):
            super().__init__()
            self.head = nn.Linear(width, width, bias=bias)

    class Holder:
        net = Net(2)
        width = 7

    def make_model(width=5):
        return Net(width)

    def make_config():
        return {"width": 3}

    def make_trouble():
        raise ValueError("no such backbone")

    model = Net(4)
"""


@pytest.mark.parametrize(
    ("attribute", "arguments", "width"),
    [
        ("Net", {}, 3),
        ("Net", {"width": 6, "bias": False}, 6),
        ("make_model", {}, 5),
        ("make_model", {"width": 8}, 8),
        ("model", {}, 4),
        ("Holder.net", {}, 2),
    ],
)
def test_a_spec_names_a_class_a_function_or_a_module(write, attribute, arguments, width):
    path = write("net.py", MODEL_FILE)
    model = build_model(f"{path}:{attribute}", arguments)
    assert model.head.weight.shape == (width, width)
    assert (model.head.bias is None) == ("bias" in arguments)


@pytest.mark.parametrize("file", ["sub/net.py", "sub/__init__.py"])
def test_a_file_that_imports_relatively_is_of_its_package(write, tmp_path, file):
    write("src/relative_pkg/__init__.py", "")
    write("src/relative_pkg/widths.py", "WIDTH = 7\n")
    write("src/relative_pkg/sub/__init__.py", "")
    write(f"src/relative_pkg/{file}", "    from ..widths import WIDTH\n" + MODEL_FILE.replace("width=3", "width=WIDTH"))
    model = build_model(f"src/relative_pkg/{file}:Net", {}, directory=tmp_path)
    assert model.head.in_features == 7
    assert type(model).__module__ == f"relative_pkg.{file[:-3].replace('/', '.').removesuffix('.__init__')}"


LIBRARIES = ("import json.decoder", "from json import decoder", "import json", "import torch.nn")


@pytest.mark.parametrize("line", LIBRARIES)
def test_a_folder_named_like_a_library_is_no_package(write, tmp_path, line):
    write("json/decoder.py", "")
    write("json/net.py", f"    {line}\n{MODEL_FILE}")
    assert type(build_model("json/net.py:Net", {}, directory=tmp_path)).__module__ == "net"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train.py", "does not say where to look and what to take"),
        ("make_model", "does not say where to look and what to take"),
        (":make_model", "does not say where to look and what to take"),
        ("net.py:", "does not say where to look and what to take"),
        ("nett.py:Net", r"There is no file .*nett\.py\."),
        ("nowhere/net.py:Net", r"There is no file .*nowhere/net\.py\."),
        (".:Net", "There is no file|raised"),
        ("train.ipynb:Net", r"train\.ipynb is a notebook, and code is taken from Python files\."),
        ("net.py:make_modle", r"has no 'make_modle'\."),
        ("net.py:Holder.nett", r"has no 'Holder\.nett'\."),
        ("no_such_package_at_all:Net", "raised ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("net.py:Holder.width", "is of type int, not a Module"),
        ("net.py:make_config", "returned a dict, not a Module"),
        ("net.py:make_trouble", r"make_trouble\(\) raised ValueError at .*net\.py:20: no such backbone"),
    ],
)
def test_a_spec_that_leads_nowhere_says_so(write, tmp_path, spec, message):
    write("net.py", MODEL_FILE)
    write("train.ipynb", "{}")
    with pytest.raises(ModelError, match=message) as caught:
        build_model(spec, {}, directory=tmp_path)
    assert caught.value.remedy.endswith((".", "?"))


def test_a_module_takes_no_arguments(write):
    path = write("net.py", MODEL_FILE)
    with pytest.raises(ModelError, match="takes no arguments: width"):
        build_model(f"{path}:model", {"width": 3})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_thing\nmodel = no_such_thing.Net()", r"ModuleNotFoundError at .*broken\.py:1: No module"),
        ("x = 1\nmodel = x.boom", r"Line 2 of .*broken\.py raised AttributeError at .*broken\.py:2: .*boom"),
        ("import sys\nmodel = sys.exit('usage: train')", r"raised ProcessEndError at .*broken\.py:2: .*usage: train"),
        ("def half(:", "raised SyntaxError"),
    ],
)
def test_an_import_that_fails_says_where(write, source, message):
    path = write("broken.py", source)
    with pytest.raises(ModelError, match=message) as caught:
        find_attribute(f"{path}:model")
    remedies = {"ModuleNotFound": "Install it", "SyntaxError": "__main__"}
    remedy = next((text for kind, text in remedies.items() if kind in message), "or name its class")
    assert remedy in caught.value.remedy
    assert "broken" not in sys.modules


@pytest.mark.parametrize("layout", ["utils.py", "utils/__init__.py", "utils/parts.py"])
def test_two_projects_with_files_of_the_same_names_keep_apart(write, tmp_path, layout):
    module = "utils.parts" if "parts" in layout else "utils"
    for project in ("first", "second"):
        write(f"{project}/{layout}", f"name = {project!r}")
        write(f"{project}/model.py", f"from {module} import name\nclass Where: ...\nWhere.name = name")
    seen = []
    for project in ("first", "second", "first"):
        with Project().preparing():
            where = find_attribute("model.py:Where", directory=tmp_path / project)
            assert pickle.loads(pickle.dumps(where)) is where
        seen.append(where.name)
    assert seen == ["first", "second", "first"]


@pytest.mark.parametrize("stem", ["types", "torch", "numpy"])
def test_a_file_named_like_an_installed_module_is_kept_apart(write, stem):
    known = sys.modules[stem]
    path = write(f"{stem}.py", "import types\nimport torch\nclass Net(torch.nn.Identity): ...\ntypes.SimpleNamespace()")
    for _ in range(2):
        assert isinstance(build_model(f"{path}:Net", {}), nn.Identity)
    assert sys.modules[stem] is known


def test_a_live_module_is_copied():
    model = nn.Linear(2, 2)
    copy = build_model(model, {})
    nn.init.zeros_(copy.weight)
    assert copy is not model
    assert model.weight.abs().sum() > 0


def test_a_module_that_cannot_be_copied_says_what_to_pass():
    model = nn.Linear(2, 2)
    model.cache = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(ModelError, match="Linear cannot be copied") as caught:
        build_model(model, {})
    assert "function that builds" in caught.value.remedy


class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("steps", torch.zeros(()))

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state): ...


def state_of(model, prefix=""):
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    return {prefix + name: tensor.clone() + 1 for name, tensor in state.items()}


def load_fitted(model, state):
    """Load the state by the model's names; return the notes of both."""
    dump = fit_state(Dump(path=Path(), nbytes=0, layout="plain", state=state, arrays={}), model)
    return [*dump.notes, *load_state(model, dump.state)]


@pytest.mark.parametrize("prefix", ["model.", "student.backbone."])
def test_a_prefix_of_the_dump_is_taken_off(prefix):
    model, state = Net(), state_of(Net(), prefix)
    assert load_fitted(model, state) == [f"The prefix {prefix!r} was taken off the weights' names."]
    assert torch.equal(model.head.weight, state[f"{prefix}head.weight"])


@pytest.mark.parametrize(("ours", "theirs"), [("_orig_mod.", ""), ("", "_orig_mod."), ("", "_fsdp_wrapped_module.")])
def test_parts_of_the_model_may_be_wrapped_on_one_side(ours, theirs):
    model = Net()
    model.encoder = torch.compile(model.encoder, backend="eager") if ours else model.encoder
    state = {name.replace("encoder.", f"encoder.{theirs}"): tensor for name, tensor in state_of(Net()).items()}
    assert load_fitted(model, state) == []
    assert torch.equal(model.state_dict()[f"encoder.{ours}weight"], state[f"encoder.{theirs}weight"])


def test_what_does_not_carry_the_prefix_is_left_out_and_counted():
    state = state_of(Net(), "model.") | {"criterion.class_weights_of_the_loss": torch.ones(3)}
    assert load_fitted(Net(), state) == [
        "The prefix 'model.' was taken off the weights' names, 1 other tensors left out."
    ]


def test_a_prefix_of_the_model_is_put_on():
    model, state = nn.ModuleDict({"net": Net()}), state_of(Net())
    (note,) = load_fitted(model, state)
    assert "was put before the weights' names" in note
    assert torch.equal(model["net"].head.weight, state["head.weight"])


WRAPPED = ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize("prefix", WRAPPED)
def test_what_wrappers_add_to_names_is_on_neither_side(prefix):
    state = state_of(Net(), prefix)
    assert load_fitted(Net(), state) == load_fitted(nn.DataParallel(Net()), state) == []
    assert load_fitted(nn.DataParallel(Net()), state_of(Net())) == []
    assert load_fitted(Net(), state | state_of(Net())) == []  # D-FINE writes both


def test_missing_and_unexpected_names_are_told():
    state = state_of(Net())
    state["haed.weight"] = state.pop("head.weight")
    with pytest.raises(ModelError) as caught:
        load_state(Net(), state)
    assert "do not fit Net (4 of 5 tensors do)" in caught.value.message
    assert "1 missing from the weights: head.weight\n  1 not in the model: haed.weight" in caught.value.message
    assert "--no-strict" in caught.value.remedy


def test_names_without_end_are_compared_in_part():
    state = {f"p{i}.{name}": tensor for i in range(4000) for name, tensor in state_of(Net()).items()}
    assert len(_prefixes(state, state_of(Net()))) == 100


def test_shapes_are_compared():
    with pytest.raises(ModelError) as caught:
        load_state(Net(3), state_of(Net(4)))
    assert "3 of another shape (weights for model): encoder.weight (4, 4) for (3, 3)" in caught.value.message
    assert "--model-arg" in caught.value.remedy


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_another_model_is_refused(strict):
    with pytest.raises(ModelError, match="0 of 2 tensors do") as caught:
        load_state(nn.Linear(2, 2), {"conv.kernel": torch.ones(3)}, strict=strict)
    assert "another model" in caught.value.remedy


def test_what_fits_is_loaded_if_asked_for():
    model, state = Net(3), state_of(Net(3))
    state["head.weight"] = torch.ones(7, 7)
    del state["steps"]
    notes = load_state(model, state, strict=False)
    assert torch.equal(model.encoder.weight, state["encoder.weight"])
    assert [note.partition(":")[0] for note in notes] == ["--no-strict", "--no-strict"]
    assert "1 missing from the weights: steps" in notes[0]
    assert "head.weight (7, 7) for (1, 3)" in notes[1]


class Tied(nn.Module):
    """Two layers of one weight, in one Parameter or in two of the same memory."""

    def __init__(self, *, same):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight if same else nn.Parameter(self.embed.weight.data)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_given_under_either_name(name, same):
    weight = torch.arange(12.0).reshape(4, 3)
    model = Tied(same=same)
    assert load_state(model, {name: weight}) == []
    assert torch.equal(model.embed.weight, weight)
    assert torch.equal(model.head.weight, weight)
    with Unfilled():
        model = Tied(same=same)
    assert load_state(model, {name: weight}, shared=True) == []
    assert torch.equal(model.embed.weight, weight)
    assert torch.equal(model.head.weight, weight)
