"""Arrays with misleading names: inputs that are called like outputs, targets that nobody would know for one."""

import math

import torch
from torch import nn

import nandoctor
from strangers.rows import Rows
from strangers.visits import louder, normal

rows = Rows()


def with_a_nan(values):
    values = values.clone()
    values[1, 2] = math.nan
    return values


@rows("precision rank linear matmul-overflow", {"scores": 100 * normal(4, 8)}, name="input called scores")
class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rank = louder(nn.Linear(8, 3), 1e4)

    def forward(self, scores):
        return self.rank(scores)


def where_known(output, batch):
    """Gauges that were down hold NaN, and the loss leaves them out."""
    known = ~batch["gauge"].isnan()
    return (output.float()[known] - batch["gauge"][known]).abs().mean()


def times_known(output, batch):
    """They are multiplied away, and are not gone."""
    known = (~batch["gauge"].isnan()).float()
    return ((output.float() - batch["gauge"]).abs() * known).sum() / known.sum()


def with_its_logit(model):
    return {**GAUGES, "logit": model(GAUGES["waypoints"]).detach()}


def with_a_broken_average(model):
    average = {"weight": with_a_nan(model.weight.detach()), "bias": model.bias.detach()}
    return {"waypoints": normal(4, 8), "logit": model(normal(4, 8)).detach(), "ema": average}


def with_an_optimizer(rate=0.1, first_moment=0.0):
    group = {"lr": rate, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
    slots = {"exp_avg": torch.full((3, 8), first_moment), "exp_avg_sq": torch.ones(3, 8)}
    optimizer = {"state": {0: slots}, "param_groups": [group], "best": math.inf}
    return {"waypoints": normal(4, 8), "optimizer": optimizer}


def with_another_output(model):
    return {"waypoints": normal(4, 8), "logit": 2 * model(normal(4, 8)).detach()}


GAUGES = {"waypoints": normal(4, 8), "gauge": with_a_nan(normal(4, 3))}
POISONED = "input . - poisoned-input"


@rows(POISONED, {"waypoints": with_a_nan(normal(4, 8))}, 8, 3, name="name nobody heard of", samples=(1,))
@rows(POISONED, {"z": with_a_nan(normal(4, 8))}, 8, 3, name="named by the user", inputs="waypoints=z")
@rows("not-reproduced", {"waypoints": normal(4, 8), "logit": with_a_nan(normal(3, 3))}, 8, 3, name="of another shape")
@rows("cannot-tell", with_a_broken_average, 8, 3, name="an average of the weights that is broken")
@rows(
    "cannot-tell",
    {"waypoints": normal(4, 8), "norm": math.nan},
    8,
    3,
    name="a number that is NaN",
    says=("`norm` is NaN",),
)
@rows("healthy", with_an_optimizer(), 8, 3, name="an optimizer")
@rows("cannot-tell", with_an_optimizer(first_moment=math.nan), 8, 3, name="an optimizer whose first moments are NaN")
@rows("cannot-tell", with_an_optimizer(rate=math.nan), 8, 3, name="an optimizer whose learning rate is NaN")
@rows("not-reproduced", {**GAUGES, "scaler": {"scale": 0.0}}, 8, 3, name="a loss scale of 0", loss=where_known)
@rows("not-reproduced", {**GAUGES, "lr": math.inf}, 8, 3, name="a rate of infinity", loss=where_known)
@rows("healthy", {**GAUGES, "best": math.inf, "lr": 0.0}, 8, 3, name="the start of a search", loss=where_known)
@rows("cannot-tell", with_another_output, 8, 3, name="the output of another step")
@rows("cannot-tell", with_its_logit, 8, 3, name="gaps that nobody reads beside an output that agrees")
@rows("healthy", with_its_logit, 8, 3, name="gaps that the loss reads beside it", loss=where_known)
@rows("input . - poisoned-target", GAUGES, 8, 3, name="gaps that are multiplied away", loss=times_known)
class Locator(nn.Linear):
    def forward(self, waypoints):
        return super().forward(waypoints)


def with_two_outputs(model):
    outputs = {name: it.detach() for name, it in model(normal(4, 8)).items()}
    return {"waypoints": normal(4, 8), **outputs, "spread": with_a_nan(outputs["spread"])}


@rows("not-reproduced", with_two_outputs, 8, 3, name="another output than the first had failed")
class Spreading(nn.Linear):
    def forward(self, waypoints):
        logit = super().forward(waypoints)
        return {"logit": logit, "spread": logit.square()}


def compared(name):
    return lambda report: (report.reproduction.output, report.reproduction.grade) == (name, "exact")


FAR = 100 * normal(2, 8).abs()


def both_outputs(model):
    logits = model.classify(FAR).detach()
    return {"x": FAR, "pred_logits": logits, "pred_boxes": torch.full((2, 4), math.inf)}


@rows("precision locate linear matmul-overflow", both_outputs, holds=compared("pred_boxes"))
class Detector(nn.Module):
    """Of two saved outputs the non-finite one is compared."""

    def __init__(self):
        super().__init__()
        self.classify = nn.Linear(8, 3)
        self.locate = louder(nn.Linear(8, 4), 1e4)
        with torch.no_grad():
            self.locate.weight.abs_()

    def forward(self, x):
        return {"pred_logits": self.classify(x), "pred_boxes": self.locate(x)}


def off_recon(output, batch):
    return (output["recon"].float() - batch["recon" if "gaps" in batch else "x"]).square().mean()


def with_its_output(model):
    x = normal(4, 8) - 1
    with nandoctor.cuda_autocast():
        return {"x": x, "recon": model(x)["recon"].detach()}


GAPS = {"x": normal(4, 8).abs(), "recon": with_a_nan(normal(4, 8)), "gaps": torch.ones(4)}


def not_compared(report):
    return report.reproduction.grade == "no-reference"


def of_energies(output, batch):
    return (output["energy"].sqrt() - batch["target"]).square().mean()


def with_energies(model):
    """The loss reads the energy by the name under which the file has it, of an fp32 run."""
    x = torch.cat([torch.zeros(1, 8), 300 * normal(3, 8)])
    return {"x": x, "energy": model(x)["energy"].detach(), "target": normal(4)}


ENERGIES = {"never": ("fp16",), "holds": compared("energy"), "loss": of_energies}


@rows("numerics <loss> sqrt gradient-singularity", with_energies, samples=(0,), **ENERGIES)
@rows("healthy", with_energies, 1.0, name="energies above 0", **ENERGIES)
class Energies(nn.Module):
    """In fp16 they would overflow."""

    def __init__(self, least=0.0):
        super().__init__()
        self.read, self.least = nn.Linear(8, 8, bias=False), least

    def forward(self, x):
        h = self.read(x)
        return {"energy": (h * h).sum(-1) + self.least, "hidden": h}


@rows("*", with_its_output, 8, 8, name="output that the loss reads by name", holds=compared("recon"), loss=off_recon)
@rows("*", GAPS, 8, 8, name="target of the name of an output", holds=not_compared, loss=off_recon)
class Reconstruction(nn.Linear):
    def forward(self, x):
        return {"recon": torch.log(super().forward(x).abs() + x), "aux": x}
