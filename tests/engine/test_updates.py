"""An optimizer's step that spoiled the weights is run again, and the op is named that made the values."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded, Reference
from nandoctor.dumps.signature import Provenance
from nandoctor.source_files import hash_of
from nandoctor.step.code_references import find_optimizer


class Trust(torch.optim.Optimizer):
    """A rate for each weight by its norm over its gradient's, and an attribute that the step reads."""

    def __init__(self, params):
        self.trust = 0.001
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["mean"] = weight.grad + group["momentum"] * state.get("mean", torch.zeros_like(weight))
                ratio = self.trust * weight.norm() / weight.grad.norm()
                weight.add_(state["mean"] * ratio, alpha=-group["lr"])


class Unbiased(torch.optim.Optimizer):
    """Divides by 1 - decay ** count, which is 0; its count is an attribute."""

    def __init__(self, params):
        super().__init__(params, {"decay": 1.0})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state.setdefault(weight, {"square": torch.zeros_like(weight)})
                state["square"].lerp_(weight.grad.square(), 1 - group["decay"])
                left = torch.tensor(1 - group["decay"] ** self.count)
                weight.sub_(weight.grad / (state["square"] / left).sqrt())


def is_weight(parameter):
    return parameter.dim() > 1


class Chosen(Trust):
    """A function among its settings says which parameters it writes."""

    def __init__(self, params):
        super().__init__([{"params": list(params), "writes": is_weight}])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in filter(group["writes"], group["params"]):
                weight.sub_(weight / weight.grad.norm())


class Unknown(Trust):
    """What it needs is no plain data, so nobody can make it again."""

    def __init__(self, params):
        super().__init__(params)
        self.scale = lambda: 1.0

    def step(self):
        self.scale()
        super().step()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def loss(output, batch):
    return (output * batch["scale"]).square().mean()


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


STEPS = [
    # optimizer, bias of the first layer, scale of the loss, op, part of its line, part of the headline
    (Trust, -100.0, 1.0, "div", "weight.grad.norm()", "`weight.grad.norm()` is 0"),
    (Chosen, -100.0, 1.0, "div", "weight.grad.norm()", "`weight.grad.norm()` is 0"),
    (Unbiased, 1.0, 1.0, "div", 'state["square"] / left', "`left` is 0"),
    (sgd(1e25), 1.0, 1e10, "add", "param.add_(grad, alpha=-lr)", "fp32 stops at"),
    (sgd(float("inf")), 1.0, 1.0, "SGD.step", "", "its lr is inf"),
    (Unknown, -100.0, 1.0, "Unknown.step", "", "from finite gradients"),
]


@pytest.mark.parametrize(("make", "bias", "scale", "op", "line", "says"), STEPS)
def test_the_op_of_an_update(make, bias, scale, op, line, says, tmp_path):
    model = build()
    nn.init.constant_(model[0].bias, bias)
    optimizer, batch = make(model.parameters()), {"x": torch.ones(3, 4), "scale": torch.tensor(scale)}
    with nandoctor.Recorder(model, loss=loss, builder=build, folder=tmp_path) as recorder:
        recorder.watch(value := loss(model(batch["x"]), batch), batch)
        value.backward()
        optimizer.step()
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    origin = report.origin
    assert (report.verdict, report.cause.code, origin.phase) == ("numerics", "nonfinite-update", "optimizer")
    assert (origin.op, origin.place.module, origin.called_from) == (op, "0", None)
    assert line in (origin.source.text if origin.source else "")
    assert says in report.headline
    told = any("was not run again, so its line is not known: it raised AttributeError" in note for note in report.notes)
    assert told is (make is Unknown)


FILE = "tests/engine/test_updates.py"
OTHER = Reference(module=__name__, name="Trust", file=FILE, sha256="0" * 64)
SAME = Reference(module=__name__, name="Trust", file=FILE, sha256=hash_of(Path(__file__)))


@pytest.mark.parametrize(
    ("reference", "own", "named", "found"),
    [
        (Reference(module="torch.optim.sgd", name="SGD"), False, "", "SGD"),
        (Reference(module="torch.optim.lr_scheduler", name="lr_scheduler"), True, "", None),
        (OTHER, True, "", "Trust"),
        (OTHER, False, "", None),
        (OTHER, False, f"{FILE}:build", None),
        (SAME, False, f"{FILE}:build", "Trust"),
        (replace(SAME, name="pytest.main"), False, f"{FILE}:build", None),
        (Reference(module="os", name="system"), True, "", None),
        (Reference(module=__name__, name="build", file=FILE), True, "", None),
        (None, True, "", None),
    ],
)
def test_which_optimizers_are_run(reference, own, named, found, tmp_path):
    says = {"provenance": Provenance(own=own, here=own), "recorded": Recorded(updater=reference)}
    dump = Dump(path=tmp_path / "x.pth", nbytes=0, layout="plain", state={}, arrays={}, **says)
    kind = find_optimizer(dump, [Path(named.rpartition(":")[0]).resolve()])
    assert (kind and kind.__name__) == found
