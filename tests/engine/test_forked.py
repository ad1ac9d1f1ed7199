"""A replay in a forked process, after its parent has made one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

AFTER = """
import os, nandoctor
def replay():
    return nandoctor.replay("sample_dumps/unet_blank_tile.pth", max_trials=3)
first = replay()
child = os.fork()
if child == 0:
    second = replay()
    same = first.report.headline == second.report.headline
    os._exit(0 if same and second.report.reproduction.grade in ("exact", "same-mask") else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.slow
def test_a_forked_process_replays():
    """With two threads: to wait for the parent's in a child hangs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", AFTER], cwd=ROOT, env=environment, timeout=300, check=False)
    assert done.returncode == 0
