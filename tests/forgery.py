"""Projects and dumps of a stranger: code that leaves a mark when it is imported or called, and files that name it.

In: what the stranger puts into a dump. Out: files below the working directory.
"""

from pathlib import Path

import torch

from nandoctor.source_files import hash_of

CODE = """
import os
from pathlib import Path
import torch


def mark(text):
    # By the system's own calls: a replay lets a script write nothing by Python's.
    file = os.open(Path(__file__).parent / "canary", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (text + "\\n").encode())
    os.close(file)


mark(f"imported {__name__}")


class Net(torch.nn.Module):
    mark("imported Net")

    def __init__(self, width=2, scale=1.0, kind="plain"):
        mark("built")
        super().__init__()
        self.width, self.scale, self.kind = width, scale, kind
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) * self.scale

    def training_step(self, batch):
        return loss_of(self(batch["x"]), batch)

    def save_pretrained(self, path):
        mark("called")

    def set_extra_state(self, state):
        mark("extra state")

    def get_extra_state(self):
        return torch.zeros(1)


def loss_of(output, batch):
    mark("loss")
    return (output - batch["y"]).square().mean()


def execute(*arguments):
    mark("executed")
"""


def make_project(folder: Path) -> Path:
    """A folder with `train.py`, whose code leaves a file called canary beside itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(CODE)
    return folder


def contents(folder: Path, *, width: int = 3, **changes) -> dict:
    """What a recorder would write of a step of `train.py:Net` whose input overflows."""
    x = torch.zeros(4, width)
    x[1] = 3e5
    source = {"module": "__main__", "file": "train.py", "sha256": hash_of(folder / "train.py")}
    state = {"linear.weight": torch.full((width, width), 2.0), "linear.bias": torch.zeros(width)}
    return {
        "format": "nandoctor.dump/1",
        "event": {"step": 4, "reason": "loss"},
        "state_dict": state,
        "calls": [{"names": ["x"], "args": (x,), "kwargs": {}}],
        "batch": {"x": x, "y": torch.zeros(4, width)},
        "output": torch.full((4, width), float("nan")),
        "method": "",
        "training": {"": True},
        "rng": {"torch": torch.get_rng_state()},
        "autocast": {"enabled": True, "device": "cuda", "dtype": "float16"},
        "model": {**source, "name": "Net", "arguments": {"width": width}},
        "loss_function": {**source, "name": "loss_of"},
        **changes,
    }


def canaries(folder: Path) -> str:
    """What the stranger's code wrote, "" where nothing of it ran."""
    return "".join(path.read_text() for path in sorted(folder.rglob("canary*")))
