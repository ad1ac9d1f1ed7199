"""Two processes: they agree on what is non-finite, stop at the same step, and each writes its own half."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nandoctor.dumps.reader import read_dump

HERE = Path(__file__).parent
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainings import Segmenter, loss_of, make_batch
from nandoctor import NonFiniteTrainingError, Recorder, cuda_autocast

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
net = Segmenter(width=3)
model = DistributedDataParallel(net)
torch.manual_seed(rank)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
recorder = Recorder(model, folder=f"{folder}/dumps", scaler=scaler, loss=loss_of, arguments={"width": 3}, in_a_row=2)
try:
    for number in range(6):
        batch = make_batch(number in (2, 3) and rank == 1)
        with recorder.step(batch):
            with cuda_autocast():
                loss = loss_of(model(batch[0]), batch)
            recorder.watch(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
except NonFiniteTrainingError as error:
    print(error.message)
"""


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_all_ranks_agree_and_each_writes_its_own(tmp_path):
    paths = [str(HERE.parents[1]), str(HERE), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)] for rank in (0, 1)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, env=environment, text=True, **pipes) for command in commands]
    said, logged = zip(*[process.communicate(timeout=300) for process in running], strict=True)
    other = "Step 2: the loss is non-finite on rank 1, whose file is the one to replay."
    assert [other in text for text in logged] == [True, False]
    stopped = "The recorder stopped the training at step 3: 2 non-finite steps in a row.\n"
    assert said == (stopped, stopped)
    names = [f"nan-step00000{step}-rank{rank}.pth" for step in (2, 3) for rank in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == names
    dumps = [read_dump(tmp_path / "dumps" / name) for name in names]
    told = [(dump.scalars["rank"], dump.scalars["world_size"], dump.scalars["nonfinite_here"]) for dump in dumps]
    assert told == [(0, 2, False), (1, 2, True)] * 2
    assert [bool(torch.isfinite(dump.arrays["output.logit"]).all()) for dump in dumps] == [True, False] * 2
    assert "middle.weight" in dumps[0].state
