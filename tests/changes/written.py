"""A step of one line of code, a change of one of its ops, and what the run and the written text make of it."""

import importlib.util
import itertools

from made_traces import make_step

from nandoctor.autocast.policy import REFERENCE
from nandoctor.changes.places import site_of
from nandoctor.engine.runner import CLOSELY
from nandoctor.fixes.writing import ChangeWriter

FILE = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        {}
"""
_NUMBERS = itertools.count()


def step_of(code, folder, x):
    path = folder / f"net_{next(_NUMBERS)}.py"
    path.write_text(FILE.format(code.replace("\n", "\n        ")))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return make_step(module.Net(), x, REFERENCE)


def run_both(code, folder, x, op, make):
    """The lines that the text of a change adds, and the outputs of a run with the change and of one with its text."""
    step = step_of(code, folder, x)
    ops = step.run(watch=CLOSELY).trace.ops
    edit = make(site_of(next(item for item in ops if item.op == op)))
    written = next(ChangeWriter(step.model, None, ops).write(edit))
    lines = [line[1:].strip() for line in written.text.splitlines() if line[:1] == "+" and line[:3] != "+++"]
    return lines, step.run(changes=(edit,)).output, step.run(changes=(written.change,)).output
