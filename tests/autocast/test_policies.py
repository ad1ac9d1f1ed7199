"""Policies: what they accept, and that they nest, cross threads, survive exceptions and leave torch as it was."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nandoctor.autocast.kernels import LISTS
from nandoctor.autocast.literals import cuda_code
from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy, cuda_autocast, torch_dtype
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.process_wide import read_switches, switched
from nandoctor.torch_compat import FP32_PRODUCTS

CPU = torch.device("cpu")
CUDA_FP16, CUDA_BF16 = Policy(name="cuda", format=FP16), Policy(name="cuda", format=BF16)
NATIVE_BF16 = Policy(name="native", format=BF16)


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def kernels():
    names = [*(op for ops in LISTS.values() for op in ops), "quantile", "cat"]
    return [torch._C._dispatch_dump(f"aten::{name}") for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex64])
def test_cuda_autocast_refuses_other_dtypes(dtype):
    with pytest.raises(NanDoctorError, match="does not compute in") as error, cuda_autocast(dtype):
        pass
    assert "float16" in error.value.remedy


def test_cuda_autocast_decorates_a_step_that_calls_itself():
    @cuda_autocast()
    def step(depth):
        return [product(), *(step(depth - 1) if depth else [])]

    assert step(2) == [torch.float16] * 3
    assert product() is torch.float32


def test_policies_nest_and_are_restored_in_order():
    with apply_policy(CUDA_FP16, CPU):
        with apply_policy(REFERENCE, CPU):
            assert product() is torch.float32
            with apply_policy(CUDA_BF16, CPU):
                assert product() is torch.bfloat16
            with apply_policy(NATIVE_BF16, CPU):
                assert product() is torch.bfloat16
            assert product() is torch.float32
        with apply_policy(CUDA_FP16, CPU):
            assert product() is torch.float16
        assert product() is torch.float16
    assert product() is torch.float32


def test_threads_run_under_their_own_policies():
    policies = [CUDA_FP16, CUDA_BF16, REFERENCE]
    barrier = threading.Barrier(len(policies))
    before, seen = kernels(), {}

    def replay(policy):
        barrier.wait(timeout=300)
        for _ in range(3):
            with apply_policy(policy, CPU):
                barrier.wait(timeout=300)
                seen.setdefault(policy, set()).add(product())
                with torch.autocast("cuda", enabled=False):
                    assert product() is torch.float32
                barrier.wait(timeout=300)

    threads = [threading.Thread(target=replay, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert seen == {policy: {torch_dtype(policy.format)} for policy in policies}
    assert kernels() == before


def test_a_thread_may_leave_first():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with cuda_autocast():
            entered.set()
            leave.wait(timeout=300)

    before = kernels()
    thread = threading.Thread(target=hold)
    with cuda_autocast():
        thread.start()
        assert entered.wait(timeout=300)
    assert kernels() != before
    leave.set()
    thread.join(timeout=300)
    assert kernels() == before


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.use_reentrant = use_reentrant
        self.dtypes = []

    def block(self, x):
        for layer in self.layers:
            x = layer(x)
            self.dtypes.append(x.dtype)
            with torch.autocast("cuda", enabled=False):
                self.dtypes.append(product())
        return x

    def forward(self, x):
        if self.use_reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("policy", [CUDA_FP16, REFERENCE, NATIVE_BF16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_recompute_under_the_same_policy(policy, use_reentrant):
    plain, model = Checkpointed(None), Checkpointed(use_reentrant)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    for module in (plain, model):
        with apply_policy(policy, CPU):
            y = module(x)
            torch.clear_autocast_cache()  # as where a region ends: up to torch 2.9, it has weights without a graph
            with torch.autocast("cuda", enabled=False):
                y.float().pow(2).sum().backward()
    assert model.dtypes[: len(plain.dtypes)] == plain.dtypes
    recomputed = model.dtypes[len(plain.dtypes) :]
    assert recomputed
    assert recomputed == plain.dtypes[: len(recomputed)]
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(x, weight)
    return torch.softmax(scores, -1) + scores * 0


def test_scripted_code_meets_the_same_kernels():
    x, weight = torch.full((1, 2), 300.0), torch.full((2, 2), 300.0)
    for _ in range(3):  # TorchScript profiles the first calls and optimizes the later ones
        with cuda_autocast():
            assert scripted(x, weight).isnan().all()
        with apply_policy(REFERENCE, CPU):
            assert scripted(x, weight).dtype is torch.float32
            assert scripted(x, weight).isfinite().all()
    script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with cuda_autocast():
        assert script(torch.randn(2, 4)).dtype is torch.float32
        assert script[0](torch.randn(2, 4)).dtype is torch.float16


def precisions():
    """How products of fp32 tensors are computed: since torch 2.9 each kind of them has its own setting."""
    if not FP32_PRODUCTS:
        return torch.get_float32_matmul_precision()
    return {getattr(torch.backends.mkldnn, kind).fp32_precision for kind in ("matmul", "conv", "rnn")}


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_products_of_fp32_tensors_are_not_computed_in_less(chosen):
    """In "medium", a CPU's may run in bf16."""
    with switched(read_switches()):
        torch.set_float32_matmul_precision(chosen)
        for policy in (CUDA_FP16, REFERENCE):
            with apply_policy(policy, CPU):
                assert precisions() == ({"ieee"} if FP32_PRODUCTS else "highest")
            assert torch.get_float32_matmul_precision() == chosen


def test_factors_are_rounded_but_for_those_of_the_host():
    """What each gave on an H100: CUDA rounds a number that lies there to the format of what it multiplies."""
    x, sent = torch.tensor([1.0, 0.125]).half(), nn.Parameter(torch.tensor(1e5))
    built, given = nn.Module(), nn.Module()
    given.kept = torch.tensor(1e5)
    given.register_buffer("sent", torch.tensor(1e5))
    with cuda_code(CPU):
        given = copy.deepcopy(given).to("cpu")
        built.kept, built.moved = torch.tensor(1e5), torch.tensor(1e5)
        built.moved = built.moved.to("cuda")

    def times(number):
        return (x * number).tolist(), (number * x).tolist(), x.clone().mul_(number).tolist()

    def is_rounded(number):
        found = {tuple(map(math.isinf, row)) for row in times(number)}
        assert len(found) == 1
        return found == {(True, True)}

    with apply_policy(CUDA_FP16, CPU):
        made = torch.tensor(1e5)
        assert not any(map(is_rounded, (made, made.abs(), built.kept, given.kept, 1e5, *torch.tensor([1e5]))))
        assert all(map(is_rounded, (sent, given.sent, sent.exp().log(), built.moved, made.to(x.device))))
        assert is_rounded(made * sent.sign())
        # Not measured: the same cast as each is loaded (fetch_and_cast, c10/core/DynamicCast.h).
        assert all(map(is_rounded, (sent.double(), sent.long())))
        assert (x.float() * sent).tolist() == [1e5, 12500]
        assert (x / nn.Parameter(torch.tensor(1e-8))).isinf().all()
        assert (x * 1e-7 / torch.tensor(1e-8)).isfinite().all()
    with apply_policy(Policy(name="native", format=FP16), CPU):
        assert (x * sent).isinf().tolist() == [True, False]
    assert not vars(made) | vars(built.kept)  # which would be saved with them


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_it_did(reentrant):
    x, weight = torch.ones(2, dtype=torch.half, requires_grad=True), nn.Parameter(torch.tensor(3.0))
    with cuda_autocast():
        y = checkpoint(lambda x: x * weight * 1e-3 * torch.tensor(1e5) * 1e-2, x, use_reentrant=reentrant)
        y.sum().backward()
    assert weight.grad == pytest.approx(2, rel=0.01)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(3, 4, device=device)
    module, rnn = nn.Linear(4, 4).to(device), nn.LSTM(4, 4).to(device)
    with torch.autocast("cuda", dtype=torch.float16):
        expected = module(x)
    with apply_policy(CUDA_FP16, device):
        assert torch.equal(module(x), expected)
    with apply_policy(REFERENCE, device):
        assert module(x.half()).dtype is torch.float32
        assert rnn(x)[0].dtype is torch.float32
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "ieee"
        with torch.autocast("cuda", dtype=torch.float16):
            assert module(x).dtype is torch.float32
    with apply_policy(REFERENCE, CPU):
        assert module.cpu()(x.cpu()).dtype is torch.float32
