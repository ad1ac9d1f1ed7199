"""Two processes train one model under FSDP2 or DDP; what they record is replayed by one."""

import pytest
import torch
import torch.distributed as dist
from ready_python import ReadyPython

import nandoctor
from nandoctor.dumps.reader import read_dump

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import nandoctor


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, 3 * width + 1)  # does not split into equal parts
        self.leave = nn.Linear(3 * width + 1, width)

    def forward(self, x):
        return x + self.leave(torch.relu(self.enter(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        roots = (self.scale * x).abs().sqrt()
        return self.head(self.dropout(hidden)).squeeze(1).square() + roots.mean(1)


def loss_of(output, batch):
    return torch.log(output).mean()


POLICIES = {
    "mixed": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "half": {"param_dtype": torch.float16},
}
MESHES = {"copies": {"mesh_shape": (2, 1), "mesh_dim_names": ("copies", "parts")}}


def main(rank, way):
    dist.init_process_group("gloo", init_method="file://" + __file__ + ".meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", **MESHES.get(way, {"mesh_shape": (2,)}))
    if way == "ddp":
        model = DistributedDataParallel(model)
    for module in () if way == "ddp" else (*model.blocks, model):
        policy = {**POLICIES.get(way, {}), **({"output_dtype": torch.float32} if module is model else {})}
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = nandoctor.Recorder(model, loss=loss_of, threshold=0) if way != "off" else None
    torch.manual_seed(rank)
    try:
        for step in range(5):
            x = torch.randn(4, 6)
            if step == 3 and rank == 1 and way not in ("off", "update"):
                x[2] = torch.arange(6.0) if way == "gradients" else 1e30
            loss = loss_of(model(x), x)
            if recorder:
                recorder.watch(loss, x)
            loss.backward()
            if step == 3 and way == "update":
                optimizer.param_groups[0]["lr"] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
            if way in ("off", "on") and step == 2:
                print([p.full_tensor().double().sum().item().hex() for p in model.parameters()])
    except nandoctor.NonFiniteTrainingError as error:
        print(error.message)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""
needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def ranks(ready_python):
    """Two, which have what FSDP2 and an optimizer import."""
    with ReadyPython("nandoctor.pipeline", "torch._dynamo") as other:
        yield ready_python, other


def train(ranks, folder, way):
    script = folder / f"train_{way}.py"
    script.write_text(SCRIPT)
    for rank, python in enumerate(ranks):
        python.start(script, rank, way, cwd=folder)
    return [python.finish().stdout.strip() for python in ranks]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("way", ["on", "mixed", "half", "copies", "ddp"])
def test_a_failing_forward_replays_without_flags(here, way, ranks):
    said = train(ranks, here, way)
    stopped = "The recorder stopped the training at step 3: the loss is non-finite{}; 1 of the last 4 steps failed."
    where = (" on rank 1, whose file is the one to replay", "")
    assert [text.splitlines()[-1] for text in said] == [stopped.format(elsewhere) for elsewhere in where]
    report = nandoctor.replay("dumps/nan-step000003-rank1.pth", fixes=False).report
    assert report.first_nonfinite.elements.samples == (2,)
    saved = [read_dump(f"dumps/nan-step000003-rank{rank}.pth") for rank in (0, 1)]
    assert [dump.scalars["nonfinite_ranks"] for dump in saved] == [[1], [1]]
    assert [dump.scalars["nonfinite_here"] for dump in saved] == [False, True]
    assert [bool(dump.arrays["output"].isfinite().all()) for dump in saved] == [True, False]
    assert all(torch.equal(saved[0].state[name], value) for name, value in saved[1].state.items())
    assert report.reproduction.grade == "exact"
    assert saved[0].missing == saved[1].missing == ()


@needs_gloo
@pytest.mark.slow
def test_an_update_that_spoils_sharded_weights(here, ranks):
    train(ranks, here, "update")
    report = nandoctor.replay("dumps/nan-step000003-rank0.pth", fixes=False).report
    assert (report.reproduction.grade, report.cause.code) == ("exact", "nonfinite-update")
    assert read_dump(report.dump.path).missing == ("optimizer: its state, which is spread over ranks",)


@needs_gloo
@pytest.mark.slow
def test_gradients_of_one_ranks_part_stop_all(here, ranks):
    why = "the loss is finite, but its gradients are not; 1 of the last 4 steps failed"
    assert train(ranks, here, "gradients") == [f"The recorder stopped the training at step 3: {why}."] * 2
    case = nandoctor.replay("dumps/nan-step000003-rank1.pth", fixes=False)
    assert case.report.reproduction.grade == "exact"
    assert (case.report.origin.phase, case.report.origin.op) == ("backward", "sqrt")


@needs_gloo
@pytest.mark.slow
def test_recording_changes_no_bit(tmp_path, ranks):
    on, off = train(ranks, tmp_path, "on"), train(ranks, tmp_path, "off")
    assert on[0].splitlines()[0] == off[0]


@needs_gloo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_flat_weights_are_refused_with_the_line_to_change():
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu")))
        with pytest.raises(nandoctor.NanDoctorError, match="FSDP1") as caught:
            nandoctor.Recorder(model)
    finally:
        dist.destroy_process_group()
    assert "fully_shard(model)" in caught.value.remedy
