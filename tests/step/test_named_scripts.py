"""Of a script that is named with --model or --loss, what a name needs is run, and nothing that trains or writes."""

import pytest
import torch

from nandoctor.errors import ModelError
from nandoctor.step.model_loading import build_model, find_attribute

TRAINING = """
import logging, os, no_such_tracker
import torch
from torch import nn

os.makedirs("runs")
logging.basicConfig(filename="train.log")
no_such_tracker.init(project="p")
{more}

def loss(output, batch):
    return output.square().mean()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.ones(2, 3)] * 3:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), "model_nan.pth")
"""
NET = "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, {width})"
WIDTHS = {
    "a number": ("WIDTH = 4", "WIDTH"),
    "arguments": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int, default=4)\n"
        "args = parser.parse_args()",
        "args.width",
    ),
    "a class of settings": ("BASE = 2\nclass CFG:\n    half = BASE\n    width = half * 2", "CFG.width"),
    "settings under the guard": ("if __name__ == '__main__':\n    WIDTH = 4\n    os.mkdir('guarded')", "WIDTH"),
    "arguments that have to be given": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int, default=4)\n"
        "parser.add_argument('data')\nparser.add_argument('--fold', required=True)\nargs = parser.parse_args()",
        "args.width",
    ),
    "a dict that is filled later": ("cfg = {}\ncfg['width'] = 1\ncfg.update(width=4)", "cfg['width']"),
    "an attribute that is set later": (
        "from types import SimpleNamespace\ncfg = SimpleNamespace()\ncfg.width = 4",
        "cfg.width",
    ),
    "a module that is patched": ("import math\nmath.width = 4", "math.width"),
    "a loop": ("layers = []\nfor width in (1, 4):\n    layers.append(width)", "layers[-1]"),
    "a choice": ("if torch.cuda.is_available() or True:\n    WIDTH = 4\nelse:\n    WIDTH = 1", "WIDTH"),
    "another function": ("SCALE = 2\ndef width(n):\n    x = n * SCALE\n    return x", "width(2)"),
    "what a decorator has registered": (
        "BUILT = {}\ndef register(f):\n    BUILT[f.__name__] = f\n    return f\n@register\ndef four():\n    return 4",
        "BUILT['four']()",
    ),
    "a type by its annotation": (
        "from typing import ClassVar\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass CFG:\n    scale: ClassVar[int] = 2\n    width: int = 4",
        "CFG().width",
    ),
    "a name that is looked up": ("def four():\n    return 4", "globals()['four']()"),
    "an optional package": (
        "try:\n    import no_such_package\n    WIDTH = 1\nexcept ImportError:\n    WIDTH = 4",
        "WIDTH",
    ),
}


@pytest.fixture
def script(here):
    def write(more):
        (here / "train.py").write_text(TRAINING.format(more=more))
        return here / "train.py"

    yield write
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"train.py"}


@pytest.mark.parametrize("what", WIDTHS)
def test_a_class_gets_what_it_reads(what, script):
    more, width = WIDTHS[what]
    path = script(f"{more}\n{NET.format(width=width)}")
    assert build_model(f"{path}:Net", {}).out_features == 4


def test_a_function_is_not_a_value_of_the_training_loop(script):
    path = script(NET.format(width=4))
    assert float(find_attribute(f"{path}:loss")(torch.full((2,), 3.0), {})) == 9.0


def test_a_model_is_as_it_was_before_it_was_trained(script):
    path = script(f"torch.manual_seed(1)\n{NET.format(width=4)}\nfor _ in range(1):\n    pass")
    torch.manual_seed(1)
    assert torch.equal(find_attribute(f"{path}:model").weight, torch.nn.Linear(3, 4).weight)


def test_a_training_that_a_name_needs_ends_where_it_begins(script):
    loop = "for _ in range(2):\n    net.zero_grad()\n    net(torch.ones(3)).sum().backward()\n    os.mkdir('trained')"
    path = script(f"{NET.format(width=4)}\nnet = Net()\n{loop}")
    assert find_attribute(f"{path}:net").weight.grad is None


IN_A_FUNCTION = {
    "what main makes": "def main():\n    width = 4\n    net = Net(width)\nmain()",
    "of its arguments": "def main(width, depth=1):\n    net = Net(width)\nWIDTH = 4\nmain(WIDTH)",
    "of what it imports and changes": (
        "def main():\n    from types import SimpleNamespace\n    cfg = SimpleNamespace()\n    cfg.width = 4\n"
        "    torch.manual_seed(os.mkdir('seeded'))\n    net = Net(cfg.width)\nmain()"
    ),
    "before it trains": (
        "def main():\n    net = Net(4)\n    for x in [torch.ones(2, 3)]:\n        net.seen = x\n"
        "        net(x).sum().backward()\n        os.mkdir('trained')\n    return net\nmain()"
    ),
}


def test_a_call_inside_of_a_function_makes_nothing(script):
    """Its arguments are names of that function, and a global of the same name is another value."""
    made = "WIDTH = 4\ndef build(width):\n    net = Net(width)\ndef sweep():\n    for WIDTH in (1, 2): build(WIDTH)"
    path = script(f"{NET.format(width='width').replace('self', 'self, width')}\n{made}")
    with pytest.raises(ModelError, match="has no 'net'"):
        find_attribute(f"{path}:net")


def test_a_class_is_taken_without_what_calls_it(script):
    calls = "torch.cuda.set_device(77)\nNet().double().state_dict(os.mkdir('trained'))"
    assert find_attribute(f"{script(NET.format(width=4) + chr(10) + calls)}:Net").__name__ == "Net"


@pytest.mark.parametrize("what", IN_A_FUNCTION)
def test_a_name_that_only_a_function_binds_is_made_by_it(what, script):
    path = script(f"{NET.format(width='width').replace('self', 'self, width')}\n{IN_A_FUNCTION[what]}")
    assert find_attribute(f"{path}:net").out_features == 4


def test_a_file_beside_it_may_import_from_it(script, tmp_path):
    path = script(NET.format(width="1"))
    (tmp_path / "wide.py").write_text("from train import Net as Base\nclass Wide(Base): width = 5")
    assert find_attribute(f"{path}:Net").__name__ == "Net"
    try:
        assert find_attribute(f"{tmp_path / 'wide.py'}:Wide").width == 5
    finally:
        (tmp_path / "wide.py").unlink()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (NET.format(width="MISSING"), "MISSING"),
        (f"from no_such_package import *\n{NET.format(width=4)}", "No module named 'no_such_package'"),
        (
            f"WIDTH = int(open('width.txt').read())\n{NET.format(width='WIDTH')}",
            "Line 9 of train.py raised FileNotFound",
        ),
    ],
)
def test_the_statement_that_stands_in_the_way_is_named(more, message, script):
    with pytest.raises(ModelError, match=message):
        build_model(f"{script(more)}:Net", {})
