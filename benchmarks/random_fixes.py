"""Search for fixes of random programs with a planted failure, and judge each verified one by what the formula means.

`python benchmarks/random_fixes.py [--num 100] [--seed 0] [--only NAME]` prints a line for each program and the totals;
it exits with 1 if a verified fix is wrong. With `--diagnosis` no fix is searched for: verdict, line, op and samples are
compared with the label, and the right program, which is healthy, is replayed as well.

A program is a small network of random width, depth and names around one formula that fails, in the forward or in the
loss. Beside the formula stands another one that gives its value exactly, or its limit: the label is known before
nandoctor sees the program. The judge runs the fixed code in float64, without nandoctor. A verified fix is wrong if
output or loss is more than 1 % off, if the gradient of a weight points the other way, or if there should be none.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from plants import PLANTS, Plant

import nandoctor
from nandoctor.evidence.report import Fix, Report

TOLERANCE = 0.01
SIGNIFICANT = 0.01
"""Gradients below this share of a weight's largest are not asked for their sign."""

PROGRAM = '''"""A program with a planted failure."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class {cls}(nn.Module):
    def __init__(self):
        super().__init__()
        self.{lift} = nn.Sequential({layers})
        self.{head} = nn.Linear({width}, {width})

    def forward(self, x, s):
        {h} = self.{lift}(x)
{forward}
        return self.{head}({h}) * {gain}


def build():
    torch.manual_seed({seed})
    return {cls}()


def loss(output, batch):
    {h}, s = output.float(), batch["s"]
{loss}
'''

NAMES = (("h", "lift", "head", "Net"), ("hidden", "encode", "project", "Model"), ("z", "body", "out", "Block"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A program: its text, the text of the same one with the right formula, its batch and the spoilt sample."""

    plant: Plant
    seed: int
    text: str
    right: str
    batch: dict[str, torch.Tensor]
    sample: int


def make_program(plant: Plant, seed: int) -> Sample:
    """Return a random program around a planted failure."""
    draw = random.Random(f"{plant.name} {seed}")
    generator = torch.Generator().manual_seed(seed)
    width, size = draw.choice((4, 5, 6, 8)), draw.choice((4, 5, 7))
    h, lift, head, cls = draw.choice(NAMES)
    layers = [f"nn.Linear({width}, {width})"]
    layers += [text for _ in range(draw.randrange(3)) for text in ("nn.Tanh()", f"nn.Linear({width}, {width})")]
    batch = {
        "x": torch.randn(size, width, generator=generator),
        "s": torch.rand(size, width, generator=generator) + 0.1,
    }
    sample = draw.randrange(size)
    plant.prepare(batch, sample)

    def write(lines: str) -> str:
        lines = _renamed(lines, h)
        usual = f"return (({h} - 0.3) ** 2).mean()"
        return PROGRAM.format(
            cls=cls,
            lift=lift,
            head=head,
            h=h,
            width=width,
            layers=", ".join(layers),
            seed=seed,
            gain=draw_gain,
            forward="" if plant.in_loss else _indented(lines, 8),
            loss=_indented(lines if plant.in_loss else usual, 4),
        )

    draw_gain = draw.choice((0.5, 1.0, 1.7))
    return Sample(
        plant=plant,
        seed=seed,
        text=write(plant.lines),
        right=write(plant.right or plant.lines),
        batch=batch,
        sample=sample,
    )


def _renamed(lines: str, h: str) -> str:
    return re.sub(r"\bh\b", h, lines)


def _indented(lines: str, by: int) -> str:
    return "\n".join(" " * by + line for line in lines.splitlines())


def load(path: Path) -> ModuleType:
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Output, loss and gradients of a program in float64."""

    output: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run(module: Any, batch: dict[str, torch.Tensor], snippet: str = "") -> Made:
    """Run a program in float64, without nandoctor."""
    model = module.build().double()
    if snippet:
        exec(snippet, {"model": model, "torch": torch})
    wide = {name: value.double() for name, value in batch.items()}
    output = model(wide["x"], wide["s"])
    output.float = lambda: output  # type: ignore[method-assign]  # the loss widens what autocast makes; here it narrows
    loss = module.loss(output, wide)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Made(output=output.detach(), loss=loss.detach(), gradients=gradients)


def find_fault(made: Made, right: Made, program: Sample) -> str:
    """Return what is wrong with a fixed program, "" if nothing is."""
    if program.plant.right is None:
        return "the program is wrong, there is nothing to verify"
    rows = [row for row in range(len(made.output)) if not (program.plant.is_free and row == program.sample)]
    if (off := _distance(made.output[rows], right.output[rows])) > TOLERANCE:
        return f"output {off:.2g} off"
    if program.plant.is_free:
        return ""
    if not program.plant.is_beyond and (off := _distance(made.loss, right.loss)) > TOLERANCE:
        return f"loss {off:.2g} off"
    for name, theirs in right.gradients.items():
        if theirs.isfinite().all() and _is_reversed(made.gradients[name], theirs):
            return f"the gradient of {name} points the other way"
    return ""


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def _is_reversed(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if most of the significant elements, by magnitude, have the other sign."""
    if not (ours.abs().max() > 0 and theirs.abs().max() > 0):
        return False
    one, other = ours / ours.abs().max(), theirs / theirs.abs().max()
    counted = torch.where((one.abs() > SIGNIFICANT) & (other.abs() > SIGNIFICANT), one.sign() * other, 0.0)
    return float(counted.sum()) < 0


def examine(program: Sample, folder: Path) -> tuple[str, list[str]]:
    """Return what the search gave (verified, workaround or none), and what is wrong with each verified fix."""
    name = f"{program.plant.name.replace('-', '_')}_{program.seed}"
    report = _replay(program.text, program, folder, name, fixes=True, max_trials=100)
    (folder / "right.py").write_text(program.right)
    right = run(load(folder / "right.py"), program.batch)
    faults = []
    for fix in report.fixes:
        if fix.verified and fix.kind in ("source", "snippet") and (fault := _judge(fix, program, right, folder)):
            faults.append(f"{fix.title}: {fault}")
    kinds = [fix for fix in report.fixes if fix.verified and fix.kind != "data"]
    given = "verified" if kinds else "workaround" if any(fix.workaround for fix in report.fixes) else "none"
    return ("healthy" if case_is_finite(report.verdict) else given), faults


def diagnose(program: Sample, folder: Path) -> list[str]:
    """Return what the diagnosis says wrongly of the program, or of the right one beside it."""
    said = _replay(program.text, program, folder, f"{program.plant.name.replace('-', '_')}_{program.seed}")
    origin = said.origin
    line = origin.source.text if origin is not None and origin.source is not None else ""
    samples = origin.elements.samples if origin is not None else None
    rows = tuple(range(len(program.batch["x"]))) if program.plant.guilty == "all" else (program.sample,)
    is_open = program.plant.guilty == "unknown"
    faults = {
        f"verdict {said.verdict}": said.verdict == "numerics",
        f"op {origin and origin.op}": origin is not None and origin.op == program.plant.op,
        f"line {line!r}": program.plant.at in line,
        f"samples {samples}": is_open or samples == rows,
    }
    wrong = [fault for fault, is_right in faults.items() if not (is_right or (is_open and said.verdict == "healthy"))]
    if program.plant.right not in (None, program.plant.lines) and not program.plant.is_beyond:
        name = f"right_{program.plant.name.replace('-', '_')}_{program.seed}"
        healthy = _replay(program.right, program, folder, name)
        wrong += [] if healthy.verdict == "healthy" else [f"false alarm: {healthy.verdict}, {healthy.headline}"]
    return wrong


def _replay(text: str, program: Sample, folder: Path, name: str, **options: Any) -> Report:
    """Write a program and its dump, and replay it; a name is imported once."""
    path = folder / f"{name}.py"
    path.write_text(text)
    model = load(path).build()
    torch.save({"state_dict": model.state_dict(), **program.batch, "autocast": False}, folder / "dump.pth")
    options = {"fixes": False, **options}
    return nandoctor.replay(folder / "dump.pth", f"{path}:build", loss=f"{path}:loss", **options).report


def case_is_finite(verdict: str) -> bool:
    """Return True if nothing failed, so that nothing was planted."""
    return verdict in ("healthy", "not-reproduced")


def _judge(fix: Fix, program: Sample, right: Made, folder: Path) -> str:
    path = folder / f"fixed_{fix.rank}.py"
    path.write_text(fix.files[0].after if fix.files else program.text)
    return find_fault(run(load(path), program.batch, "" if fix.files else fix.patch), right, program)


def main() -> None:
    """Print a line for each program, then the totals."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--only", default="", help="plants whose name contains this")
    parser.add_argument("--diagnosis", action="store_true", help="judge the diagnosis, and search for no fixes")
    options = parser.parse_args()
    plants = [plant for plant in PLANTS if options.only in plant.name]
    tally, num_wrong = Counter[str](), 0
    sys.dont_write_bytecode = True
    for number in range(options.num):
        program = make_program(plants[number % len(plants)], options.seed + number // len(plants))
        with tempfile.TemporaryDirectory() as folder:
            if options.diagnosis:
                faults = diagnose(program, Path(folder))
                given = "wrong" if faults else "right"
            else:
                given, faults = examine(program, Path(folder))
        tally[given] += 1
        num_wrong += bool(faults)
        print(
            f"{program.plant.name:<20} {options.seed + number // len(plants):>4} {given:<11} {'; '.join(faults)}",
            flush=True,
        )
    print(f"\n{options.num} programs: {', '.join(f'{count} {what}' for what, count in tally.items())}")
    print(f"{'diagnosis' if options.diagnosis else 'verified and'} wrong: {num_wrong}")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
