"""What a model's own code says for CUDA: autocast regions, custom functions and device literals, replayed on a CPU."""

import threading
import warnings

import pytest
import torch
from torch import nn

from nandoctor.autocast.literals import cuda_code
from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy, cuda_autocast
from nandoctor.evidence.formats import FP16

CPU = torch.device("cpu")
CUDA_FP16 = Policy(name="cuda", format=FP16)
NATIVE_FP16 = Policy(name="native", format=FP16)

every_policy = pytest.mark.parametrize("policy", [CUDA_FP16, NATIVE_FP16, REFERENCE], ids=lambda p: p.name)


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def old_style(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cuda.amp.autocast(*args, **kwargs)


OFF = [
    lambda: torch.autocast("cuda", enabled=False),
    lambda: torch.amp.autocast("cuda", enabled=False),
    lambda: torch.amp.autocast(device_type="cuda", enabled=False, dtype=torch.bfloat16),
    lambda: old_style(False),
    lambda: old_style(enabled=False),
    lambda: torch.autocast(torch.ones(1).device.type, enabled=False),
]


@every_policy
@pytest.mark.parametrize("region", OFF)
def test_a_region_that_turns_autocast_off(policy, region):
    with apply_policy(policy, CPU):
        with region():
            assert product() is torch.float32
            assert not torch.is_autocast_enabled()
            assert not torch.is_autocast_enabled("cuda")
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled()
        assert product() is (torch.float32 if policy is REFERENCE else torch.float16)


@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: old_style(dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
)
def test_a_region_that_chooses_its_dtype(region):
    with apply_policy(CUDA_FP16, CPU):
        with region():
            assert product() is torch.bfloat16
            assert torch.get_autocast_dtype("cuda") is torch.get_autocast_dtype("cpu") is torch.bfloat16
            with torch.autocast("cuda", dtype=torch.float32):
                assert product() is torch.float32
        assert product() is torch.float16
    with apply_policy(REFERENCE, CPU), region():
        assert product() is torch.float32
        assert torch.get_autocast_dtype("cuda") is torch.float32


def test_what_the_code_asks():
    with cuda_autocast(torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        with pytest.warns(DeprecationWarning, match="get_autocast_gpu_dtype"):
            assert torch.get_autocast_gpu_dtype() is torch.bfloat16


def build_model():
    """A model whose regions are made with its class and its instance, as model code does."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = torch.autocast("cuda", dtype=torch.bfloat16)

        @torch.autocast("cuda", enabled=False)
        def off(self):
            return product()

        @torch.autocast("cuda", dtype=torch.bfloat16)
        def on(self, depth):
            return self.on(depth - 1) if depth else product()

        def forward(self):
            with self.low, self.low:
                inside = product()
            return self.off(), self.on(2), inside, product()

    return Model()


@every_policy
def test_regions_made_while_the_model_is_built(policy):
    with cuda_code(CPU):
        model = build_model()
    region, default = (torch.float32,) * 2 if policy is REFERENCE else (torch.bfloat16, torch.float16)
    with apply_policy(policy, CPU):
        assert model() == (torch.float32, region, region, default)
    assert product() is torch.float32


def test_regions_of_another_thread_are_its_own():
    seen = []

    def other():
        with torch.autocast("cuda", enabled=False):
            seen.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(torch.is_autocast_enabled("cuda"))

    with cuda_autocast():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert product() is torch.float16
    assert seen == [False, False]


def make_function(cast_inputs):
    """A custom function decorated while the model is built; it records what it sees."""
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            seen.append((a.dtype, torch.is_autocast_enabled("cpu")))
            return torch.mm(a, b)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            seen.append((gradient.dtype, torch.is_autocast_enabled("cpu")))
            return gradient @ b.T, a.T @ gradient

    return Product, seen


@pytest.mark.parametrize(
    ("policy", "cast_inputs", "result", "expected"),
    [
        (CUDA_FP16, torch.float32, torch.float32, [(torch.float32, False), (torch.float32, False)]),
        (CUDA_FP16, torch.float16, torch.float16, [(torch.float16, False), (torch.float16, False)]),
        (CUDA_FP16, None, torch.float16, [(torch.float32, True), (torch.float16, True)]),
        (NATIVE_FP16, torch.float32, torch.float32, [(torch.float32, False), (torch.float32, False)]),
        (REFERENCE, torch.float16, torch.float32, [(torch.float32, False), (torch.float32, False)]),
        (REFERENCE, None, torch.float32, [(torch.float32, True), (torch.float32, True)]),
    ],
)
def test_custom_functions(policy, cast_inputs, result, expected):
    function, seen = make_function(cast_inputs)
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with apply_policy(policy, CPU):
        y = function.apply(a, b)
        with torch.autocast("cuda", enabled=False):  # the usual training step calls backward outside autocast
            y.float().sum().backward()
    assert y.dtype is result
    assert seen == expected
    assert a.grad.dtype is b.grad.dtype is torch.float32


class Literals(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, device="cuda").cuda().to("cuda:0").to(device="cuda")
        with torch.device("cuda"):
            self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        device = torch.device("cuda", 0)
        tensors = [
            x.cuda(),
            x.cuda(0, non_blocking=True),
            x.to("cuda"),
            x.to(0),
            x.to(device, torch.float32, non_blocking=True),
            x.to(device=device, dtype=torch.float32),
            torch.zeros(2, device="cuda"),
            torch.arange(2, device=device),
            torch.tensor([1.0], device="cuda:0"),
            torch.as_tensor([1.0], device="cuda"),
            torch.zeros_like(x, device="cuda"),
            x.new_zeros(2, device="cuda"),
            torch.full((2,), 1.0, device=0),
        ]
        with torch.device("cuda"):
            tensors.append(torch.eye(2))
        assert {t.device for t in tensors} == {CPU}
        return self.linear(x.cuda()) * self.scale


@every_policy
def test_device_literals_go_to_the_replays_device(policy):
    with cuda_code(CPU):
        model = Literals()
    assert {p.device for p in model.parameters()} == {CPU}
    with apply_policy(policy, CPU):
        assert model(torch.ones(1, 2)).isfinite().all()


def test_other_devices_and_arguments_are_left_alone():
    with cuda_autocast():
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.zeros(2).to("meta").device.type == "meta"
        assert torch.zeros(2).to(torch.float64).dtype is torch.float64
        assert torch.zeros(2).to(torch.zeros(1, device="meta")).device.type == "meta"
        assert torch.ones(2, dtype=torch.bool).to(torch.float32, True).dtype is torch.float32
        with torch.device("meta"):
            assert torch.zeros(2).device.type == "meta"


def test_outside_a_replay_torch_says_what_it_always_says():
    with cuda_code(CPU):
        pass
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region = torch.autocast("cuda")
    assert not region._enabled
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")
