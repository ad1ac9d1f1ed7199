"""Runs a script in a process of its own, as `python script.py` and `python -m package.module` do."""

import builtins
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

LACKING = {
    "wandb": MagicMock(config=SimpleNamespace(lr=1e-3, hidden=16)),
    "torch.utils.tensorboard": MagicMock(),
    "tqdm_missing_bar": SimpleNamespace(progress=list),
}
"""What the scripts import and the tests do not install."""


def run(folder: Path, words: list[str]) -> None:
    """Run the words that follow `python` in the folder."""
    os.chdir(folder)
    sys.modules.update(LACKING)
    builtins.get_ipython = MagicMock
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, str(folder if is_module else (folder / words[0]).parent))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
