"""Precision policies of runs; and `cuda_autocast`, CUDA's autocast on any device, for a user's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from nandoctor.autocast.kernels import install_kernels, keep_nonfinite, shared_kernels
from nandoctor.autocast.literals import FP32_FOR_HALF, FP64_FOR_ALL, Wider, cuda_code, regions_patched
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FORMATS, FP32, FP64, FloatFormat
from nandoctor.process_wide import Shared, exact_switches, switched
from nandoctor.text import dtype_name
from nandoctor.torch_compat import TORCH, check_torch, set_jit_autocast

PolicyName = Literal["fp32", "fp64", "cuda", "native"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The format of a run's matrix products, and the op lists that it follows.

    "cuda" follows CUDA's op lists on any device, "native" those of the device itself; both take fp16 and bf16. "fp32"
    is the reference: autocast stays on, so that a model that checks for it takes the same path, but nothing is rounded,
    and half precision named in the code becomes fp32. "fp64" has autocast off, for a model and a batch in float64. If
    `ambient` is False, the lists apply only in autocast regions that the model opens itself. Torch's lists differ
    between versions; "cuda" follows those of `torch`.
    """

    name: PolicyName
    format: FloatFormat
    ambient: bool = True
    torch: tuple[int, int] = TORCH

    @property
    def label(self) -> str:
        """The name in a report: "none" if autocast was off except in the model's own regions."""
        return self.name if self.ambient else "none"

    @property
    def wider(self) -> Wider:
        """The formats that a reference widens; none for another policy."""
        return _WIDER.get(self.name, {})


_WIDER: Mapping[PolicyName, Wider] = {"fp32": FP32_FOR_HALF, "fp64": FP64_FOR_ALL}
LOW_DTYPES = (torch.float16, torch.bfloat16)
REFERENCE = Policy(name="fp32", format=FP32)
EXACT = Policy(name="fp64", format=FP64)


def torch_dtype(format: FloatFormat) -> torch.dtype:  # noqa: A002
    """Return the torch dtype of a storage format; tfloat32, which only exists inside products, has none."""
    dtype = getattr(torch, format.name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def apply_policy(policy: Policy, device: torch.device) -> Iterator[None]:
    """Make what this thread runs on `device` follow the policy while the context is open.

    It may be nested and entered from several threads at once; all of torch's state is restored on exit. A graph built
    inside can be differentiated later, except that `torch.utils.checkpoint` recomputes under the policy only while the
    context is open.
    """
    check_torch()
    dtype = torch_dtype(policy.format)
    with ExitStack() as stack:
        if device.type != "cuda" or policy.wider:
            stack.enter_context(cuda_code(device, policy.wider))
        if device.type == "cpu" and policy.name != "native":
            stack.enter_context(keep_nonfinite)
        # Tensors that the code makes without a dtype have to match the others.
        default = torch.get_default_dtype()
        stack.enter_context(switched({"default_dtype": policy.wider.get(default, default)}))
        if policy.name == "fp64":
            # Autocast does not use the fused layers of nn.TransformerEncoder, whose padded rows are NaN.
            stack.enter_context(switched({"mha_fastpath": False}))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            yield
            return
        if policy.name == "fp32" or (policy.name == "cuda" and device.type != "cuda"):
            stack.enter_context(_exact_products(device.type))
            stack.enter_context(install_kernels(device.type, policy.torch))
        if policy.ambient:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
            # Inside a reference the region alone would stay in float32, as a model's own regions do.
            torch.set_autocast_dtype(device.type, dtype)
            torch.set_autocast_dtype("cuda", dtype)
        yield


@contextmanager
def kernels_kept(policy: Policy, device: torch.device) -> Iterator[None]:
    """Keep the kernels of `apply_policy` registered: registering them takes longer than running a small model.

    If `policy` uses the device's own lists, no kernel is registered.
    """
    emulates = device.type != "cuda" and policy.name != "native"
    kernels = shared_kernels(device.type) if emulates else nullcontext()
    with regions_patched, kernels, keep_nonfinite if emulates and device.type == "cpu" else nullcontext():
        yield


@cache
def _exact_products(device_type: str) -> Shared:
    """Return a context in which products of fp32 tensors are computed in fp32, whatever torch's settings are."""

    @contextmanager
    def exact() -> Iterator[None]:
        with switched(exact_switches(device_type)), ExitStack() as undo:
            undo.callback(set_jit_autocast, set_jit_autocast(False))
            yield

    return Shared(exact)


@contextmanager
def cuda_autocast(dtype: torch.dtype = torch.float16, device: str = "cpu") -> Iterator[None]:
    """CUDA's autocast on any device, like `torch.autocast("cuda", dtype)` on a GPU: a context, or a decorator.

    With `torch.utils.checkpoint`, which computes again in the backward pass, call `backward()` inside the context.

    Args:
        dtype: float16 or bfloat16.
        device: the type of the device that the model is on.

    Raises:
        NanDoctorError: a dtype other than float16 and bfloat16.
    """
    name = dtype_name(dtype)
    if dtype not in LOW_DTYPES:
        raise NanDoctorError(f"Autocast does not compute in {name}.", remedy="Choose float16 or bfloat16 as its dtype.")
    with apply_policy(Policy(name="cuda", format=FORMATS[name]), torch.device(device)):
        yield
