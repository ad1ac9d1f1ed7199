"""On a CUDA device: what happened there is found again on it and on a CPU, and training is left as it was."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from capture.trainings import Segmenter, loss_of, make_batch
from sick_models import all_cases, healthy_models
from sick_models.judging import faults
from torch import nn
from torch.utils.checkpoint import checkpoint

import nandoctor
from nandoctor.evidence.formats import FP16

if not torch.cuda.is_available():  # hundreds of tests: to skip each would take a second
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.cuda
DEVICES = ("cpu", "cuda")
CASES = {case.name: case for case in (*all_cases(), *healthy_models())}


def save_step(case, path):
    """What a training script on the GPU saves of a case's step under CUDA's own autocast; its output too."""
    model = case.build().to("cuda").train(case.train)
    batch = {name: array.to("cuda") for name, array in case.batch().items()}
    dump = {"state_dict": copy.deepcopy(model.state_dict()), **batch}
    with torch.autocast("cuda", torch.float16):
        output = case.call(model, batch)
    torch.save({**dump, "logit": output.detach()} if isinstance(output, torch.Tensor) else dump, path)
    return "logit" if isinstance(output, torch.Tensor) else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_what_a_gpu_saved(tmp_path, name, device):
    case, path = CASES[name], tmp_path / "nan.pth"
    if case.optimizer is not None:
        pytest.skip("the step after the one that is saved")
    saved = save_step(case, path)
    report = nandoctor.replay(
        path,
        model=case.build,
        call=lambda model, batch: case.call(model, {name: batch[name] for name in case.batch()}),
        loss=case.loss,
        loss_scale=case.loss_scale,
        mode="train" if case.train else "eval",
        device=device,
        output=saved,
        fixes=False,
    ).report
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in case.build().modules())
    if draws and case.verdict == "healthy":  # a generator's state is not in the file, and a GPU's is not a CPU's
        assert report.verdict in ("healthy", "cannot-tell")
        return
    assert faults(case, report) == []
    if saved is not None:
        assert report.reproduction.grade in ("exact", "same-mask")


def test_a_gpu_refuses_a_constant_that_a_cpu_takes():
    scores = torch.zeros(2, dtype=torch.half, device="cuda")
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.where(scores > 0, scores, -1e9)


@pytest.mark.parametrize("of", ["device", "host"])
@pytest.mark.parametrize("number", [1e5, 1e-8, 1.0003, 3e-6])
def test_a_factor_is_rounded_as_a_gpu_rounds_it(number, of):
    def scale(x, factor):
        mine = factor if of == "device" else torch.tensor(number)
        return torch.cat([x * mine, mine * x, x / mine, x.mul(mine), torch.div(x, mine), x.clone().mul_(mine)])

    x, factor = torch.linspace(-2, 2, 9).half(), torch.tensor(number)
    with nandoctor.cuda_autocast():
        emulated = scale(x, factor)
    real = scale(x.to("cuda"), factor.to("cuda")).cpu()
    near = {"rtol": 0, "atol": 0} if of == "device" else {"rtol": 2 * FP16.eps, "atol": 2 * FP16.smallest_subnormal}
    torch.testing.assert_close(emulated, real, equal_nan=True, **near)


def train(device, folder, *, amp=torch.float16, fused=False, num_steps=8, checkpointed=False, dropout=0.5):
    """A loop with a recorder where there is a folder; what it leaves behind."""
    torch.manual_seed(0)
    model = Segmenter(dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=amp is torch.float16)
    recorder = None
    if folder is not None:
        options = {"scaler": scaler if scaler.is_enabled() else None, "arguments": {"dropout": dropout}}
        recorder = nandoctor.Recorder(model, folder=folder, loss=loss_of, **options)
    for number in range(num_steps):
        batch = tuple(tensor.to(device) for tensor in make_batch(loud=number == 5))
        with torch.autocast(device, amp) if amp else nullcontext():
            output = checkpoint(model, batch[0], use_reentrant=False) if checkpointed else model(batch[0])
            loss = loss_of(output, batch)
        if recorder is not None:
            recorder.watch(loss, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if recorder is not None:
        recorder.close()
    moments = [tensor for state in optimizer.state_dict()["state"].values() for tensor in state.values()]
    left = [*model.state_dict().values(), *moments, torch.rand(3, device=device), torch.rand(3)]
    return [tensor.cpu().reshape(-1).view(torch.uint8) for tensor in left]


WAYS = {
    "fp16": {},
    "fp16, fused": {"fused": True},
    "bf16": {"amp": torch.bfloat16},
    "fp32": {"amp": None},
    "checkpointed": {"checkpointed": True},
}


@pytest.mark.parametrize("name", WAYS)
def test_training_is_bit_identical_with_a_recorder(tmp_path, name):
    without, recorded = train("cuda", None, **WAYS[name]), train("cuda", tmp_path, **WAYS[name])
    assert len(without) == len(recorded) > 10
    assert all(map(torch.equal, without, recorded))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp16", "fp16, fused"])
def test_a_recorded_step_replays_on_either(tmp_path, name, device):
    train("cuda", tmp_path, num_steps=6, **WAYS[name])
    dump = tmp_path / "nan-step000005.pth"
    report = nandoctor.replay(dump, device=device).report
    assert report.verdict == "precision"
    assert report.origin.place.module == "middle"
    assert report.reproduction.grade == ("exact" if device == "cuda" else report.reproduction.grade)
    if device == "cpu":
        assert any(fix.verified for fix in report.fixes)
    else:  # where dropout draws another mask in fp32
        assert any("another dropout mask" in note for note in report.notes)


def test_a_fix_is_verified_there(tmp_path):
    train("cuda", tmp_path, num_steps=6, dropout=0.0)
    report = nandoctor.replay(tmp_path / "nan-step000005.pth", device="cuda").report
    assert report.reproduction.grade == "exact"
    assert any(fix.verified for fix in report.fixes)
    assert not any("another dropout mask" in note for note in report.notes)


def test_attention_keeps_what_is_not_finite():
    query = torch.randn(1, 2, 8, 16).half()
    query[0, 0, 3] = float("nan")
    with nandoctor.cuda_autocast():
        emulated = F.scaled_dot_product_attention(query, query, query)
    real = F.scaled_dot_product_attention(*[query.to("cuda")] * 3).cpu()
    assert torch.equal(emulated.isfinite(), real.isfinite())
