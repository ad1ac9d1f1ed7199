"""From a dump, a model and settings to something that runs; what is in the way is told before anything is built."""

import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import Returns
from torch import nn

import nandoctor
from nandoctor.dumps.dump import Dump
from nandoctor.errors import DumpError, ModelError, NanDoctorError
from nandoctor.step.settings import Settings
from nandoctor.step.setup import prepare

IMAGE = torch.tensor([[1.0, 2.0, 3.0]])
FUNCTIONS = """
import torch
from tiny_models import Returns

def call(model, batch):
    return {"out": model(batch["image"] * 2), "names": sorted(batch)}

def loss(output, batch):
    return (output - batch["mask"]).sum()

device = torch.device("cuda").type

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, device="cuda"))

    def forward(self, image):
        return image.cuda() * self.weight.cuda()
"""


def dump_of(model, scalars=None, **arrays):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Dump(path=Path("dump.pth"), nbytes=1, layout="plain", state=state, arrays=arrays, scalars=scalars or {})


def run_first(preparation):
    step = preparation.steps[0]
    return step.call.forward(step.call.batch)


def test_the_weights_the_batch_and_the_call_come_together():
    model = nn.Linear(3, 2)
    preparation = prepare(dump_of(model, image=IMAGE, logit=torch.full((1, 2), 0.3)), Settings(model=nn.Linear(3, 2)))
    assert torch.equal(run_first(preparation), model(IMAGE))
    assert preparation.steps[0].call.description == "model(input=image)"
    assert preparation.steps[0].call.used == {"image"}
    assert preparation.outputs.graded[0] == "logit"
    assert preparation.notes == ()


def test_saved_outputs_do_not_go_in():
    dump = dump_of(nn.Identity(), image=IMAGE, logit=IMAGE, aux_logit=IMAGE, mask=IMAGE)
    preparation = prepare(dump, Settings(model=Returns(lambda batch: batch), inputs=("*",)))
    assert list(run_first(preparation)) == ["image", "mask"]
    assert preparation.outputs.graded[0] == "logit"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda output, teacher_logits: (output - teacher_logits).sum(), None),
        (lambda logits, teacher_logits: (logits - teacher_logits).sum(), None),
        (lambda teacher_logits: teacher_logits.sum(), "teacher_logits"),
    ],
)
def test_what_a_loss_takes_beside_the_output_is_no_output(loss, expected):
    dump = dump_of(nn.Identity(), input=IMAGE, teacher_logits=IMAGE)
    outputs = prepare(dump, Settings(model=nn.Identity(), loss=loss)).outputs
    assert (outputs.graded[0] if outputs.graded else None) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_float64_arrays_go_in_as_what_the_model_computes_in(dtype, expected):
    model = nn.Linear(3, 2, dtype=dtype)
    dump = dump_of(model, image=IMAGE.double(), labels=torch.arange(3))
    preparation = prepare(dump, Settings(model=model))
    batch = preparation.steps[0].call.batch
    assert (batch["image"].dtype, batch["labels"].dtype) == (expected, torch.int64)
    assert [note.partition(" ")[0] for note in preparation.notes] == ["image"] * (expected is torch.float32)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A folder with a file of functions, on nobody's import path afterwards."""
    (tmp_path / "functions_of_the_test.py").write_text(FUNCTIONS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_call_and_a_loss_are_found_by_their_specs(functions):
    specs = {"call": "functions_of_the_test.py:call", "loss": "functions_of_the_test.py:loss"}
    settings = Settings(model=nn.Identity(), **specs, directory=functions)
    preparation = prepare(dump_of(nn.Identity(), image=IMAGE, mask=IMAGE, logit=IMAGE), settings)
    output = run_first(preparation)
    assert (output["out"].tolist(), output["names"]) == ([[2.0, 4.0, 6.0]], ["image", "logit", "mask"])
    assert preparation.steps[0].call.used == {"image", "mask"}
    assert float(preparation.steps[0].loss(output["out"], preparation.steps[0].call.batch)) == 6.0


def test_code_for_cuda_is_built_on_the_replays_device(functions):
    settings = Settings(model="functions_of_the_test.py:Net", directory=functions)
    dump = replace(dump_of(nn.Identity(), image=IMAGE), state={"weight": torch.full((3,), 2.0)})
    assert next(prepare(dump, settings).steps[0].model.parameters()).device.type == "cpu"


class WithoutForward(nn.Linear):
    forward = nn.Module.forward


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        (None, Settings(), ModelError, "not the model's code"),
        (nn.Linear(2, 2), Settings(), ModelError, "another model's state dict|do not fit"),
        (WithoutForward(3, 2), Settings(), ModelError, "The model has no forward"),
        (nn.Linear(3, 2), Settings(inputs=("pixels",)), ModelError, "no array 'pixels'"),
        (nn.Linear(3, 2), Settings(output="pixels"), DumpError, "no array 'pixels'"),
        (nn.Linear(3, 2), Settings(call="no_such_module_here:f"), ModelError, "no_such_module_here"),
    ],
)
def test_what_does_not_fit_says_what_to_do(model, settings, error, message, here):
    with pytest.raises(error, match=message) as caught:
        prepare(dump_of(nn.Linear(3, 2), image=IMAGE), replace(settings, model=model))
    assert caught.value.remedy.endswith(".")


BUILT = {
    "net = Net(3)": "train.py:net",
    "G, D = Net(3), Net(4)": "train.py:G",
    "D, G = Net(4), Net(3)": "train.py:G",  # whose shapes are those of the weights
    "class Trainer:\n    def __init__(self): self.net = Net(3)": "train.py:Net --model-arg width=3",
    "class A: w = 3\nclass B:\n    def __init__(self): Net(width=A)": "train.py:Net --model-arg width=train.py:A",
    "class CFG: w = 3\ndef main():\n    model = Net(CFG).eval()": "train.py:model",
    "def main(cfg):\n    net = Net(cfg)\nif __name__ == '__main__':\n    main(3)": "train.py:net",
    "CFG = 3\nif __name__ == '__main__':\n    net = Net(CFG)": "train.py:net",
    "from stat import ST_NLINK as A\ndef main(): return Net(width=A)": "train.py:Net --model-arg width=train.py:A",
    "def make(cfg):\n    return Net(cfg)\nnet = make(3)": "train.py:net",
}
NET = "from torch import nn\ndef Net(width): return nn.Linear(getattr(width, 'w', width), 2)"


@pytest.mark.parametrize("call", BUILT)
def test_a_class_that_lacks_arguments_is_built_as_its_file_does(call, here):
    Path("train.py").write_text(f"{NET}\n{call}\n")
    made = prepare(dump_of(nn.Linear(3, 2), image=IMAGE), Settings(model="train.py:Net"))
    assert f"Built as your own code or the file shows: --model {BUILT[call]}" in made.notes


def test_arguments_are_taken_from_the_dump(here):
    Path("train.py").write_text(f"{NET}\nnet = Net(5)\n")
    dump = replace(dump_of(nn.Linear(3, 2), image=IMAGE), scalars={"args.width": 3, "args.seed": 1})
    note = "Built as your own code or the file shows: --model train.py:Net --model-arg width=3"
    assert note in prepare(dump, Settings(model="train.py:Net")).notes


@pytest.mark.parametrize("call", ["def main(cfg): return Net(cfg)", "def main(cfg):\n    net = Net(cfg)\nmain()"])
def test_arguments_that_no_file_shows_are_asked_for(call, here):
    Path("train.py").write_text(f"{NET}\nif __name__ == '__main__':\n    {call.replace(chr(10), chr(10) + '    ')}\n")
    with pytest.raises(ModelError) as caught:
        prepare(dump_of(nn.Linear(3, 2), image=IMAGE), Settings(model="train.py:Net"))
    assert "--model-arg K=V" in caught.value.remedy


@pytest.mark.parametrize(
    ("width", "given", "call", "offered"),
    [
        (4, {}, "big = Net(3)", "net.py:Net --model-arg width=3"),
        (4, {}, "big = Net(5)", None),
        (4, {}, "big = Net(int('5'))", "other.py:big"),  # nothing is run to look at its shapes
        (3, {"width": 5}, "big = Net(5)", "net.py:Net"),
        (3, {"widht": 5}, "big = Net(5)", "net.py:Net"),
    ],
)
def test_a_call_is_offered_if_the_weights_fit_it(width, given, call, offered, here):
    Path("net.py").write_text(NET.replace("(width)", f"(width={width})"))
    Path("other.py").write_text(f"from net import Net\nopen('ran', 'w')\n{call}\n")
    with pytest.raises(ModelError) as caught:
        prepare(dump_of(nn.Linear(3, 2), image=IMAGE), Settings(model="net.py:Net", model_args=given))
    assert caught.value.options == (("--model", *offered.split()) if offered else ())
    assert "widht" in given or "--no-strict" in caught.value.remedy
    assert not Path("ran").exists()


WITHOUT_A_MODEL = {
    "class Net(nn.Module):\n    def __init__(self): self.stem, self.head = 1, 2": "train.py:Net",
    "class Net(nn.Module):\n    def __init__(self, width): self.stem = self.head = 1\nnet = Net(3)": "train.py:Net",
    "class Net(nn.Module):\n    def __init__(self): self.stem = 1; self.register_buffer('head', 2)": "train.py:Net",
    "class Net(nn.Module):\n    def __init__(self): self.stem = 1": None,
}


@pytest.mark.parametrize("code", WITHOUT_A_MODEL)
def test_a_class_with_the_weights_attributes_is_named(code, here):
    Path("train.py").write_text(code)
    state = {"stem.weight": torch.ones(1), "head.0.bias": torch.ones(1)}
    with pytest.raises(ModelError, match="not the model's code") as caught:
        prepare(replace(dump_of(nn.Identity(), image=IMAGE), state=state), Settings())
    named = re.search(r"names in .*: --model (.*)", caught.value.remedy)
    assert (named and named[1]) == WITHOUT_A_MODEL[code]


def test_of_several_nets_the_one_that_takes_an_array_comes_first(here):
    classes = ("class {}(nn.Module):\n    def __init__(self): self.{} = 1".format(*pair) for pair in ("Gg", "Dd"))
    Path("gan.py").write_text("\n".join(classes))
    dump = replace(dump_of(nn.Identity(), image=torch.ones(2, 3)), state={"g.weight": torch.ones(3, 2)})
    with pytest.raises(ModelError, match=r"gan\.py:D and gan\.py:G") as caught:
        prepare(replace(dump, other_states={"D": {"d.weight": torch.ones(2, 3)}}), Settings())
    assert caught.value.options == ("--model", "gan.py:D")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_an_error_that_names_the_emulation():
    with pytest.raises(NanDoctorError, match="no CUDA device") as caught:
        prepare(dump_of(nn.Identity(), image=IMAGE), Settings(model=nn.Identity(), device="cuda"))
    assert "CPU replays a CUDA run" in caught.value.remedy


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Counted(nn.Linear):
    built = 0

    def __init__(self):
        super().__init__(3, 2)
        Counted.built += 1


@pytest.fixture
def dump(tmp_path):
    torch.save({"state_dict": nn.Linear(3, 2).state_dict(), "x": torch.ones(4, 3)}, tmp_path / "dump.pth")
    Counted.built = 0
    return tmp_path / "dump.pth"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (torch.inference_mode, r"inference_mode\(\) is on"),
        (lambda: torch.device("meta"), "on the device 'meta'"),
        (lambda: default_device("meta"), "on the device 'meta'"),
    ],
    ids=["inference mode", "device context", "default device"],
)
def test_modes_without_real_tensors_are_refused(dump, mode, said):
    for replay in (nandoctor.replay, nandoctor.verify, nandoctor.repro):
        with mode(), pytest.raises(NanDoctorError, match=said):
            replay(dump, Counted)
    assert Counted.built == 0
    assert nandoctor.replay(dump, Counted).verdict == "healthy"


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.device("cpu"), lambda: default_device("cpu")])
def test_modes_with_real_tensors_are_none_of_our_business(dump, mode):
    with mode():
        assert nandoctor.replay(dump, Counted, fixes=False).verdict == "healthy"
