"""Shared fixtures: every test leaves torch as it found it."""

from __future__ import annotations

import pytest
import torch
import torch.utils._device


def jit_autocast_mode():
    mode = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(mode)
    return mode


def torch_state():
    return {
        "autocast": {d: torch.is_autocast_enabled(d) for d in ("cpu", "cuda")},
        "autocast_dtype": {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda")},
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast_enter": torch.autocast.__enter__,
        "autocast_exit": torch.autocast.__exit__,
        "autocast_init": torch.autocast.__init__,
        "custom_fwd_cast": torch.amp.autocast_mode._cast,
        "device_context_init": torch.utils._device.DeviceContext.__init__,
        "fp32_precision": (torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision),
        "jit_autocast": jit_autocast_mode(),
        "function_modes": torch._C._len_torch_function_stack(),
        "dispatch_modes": torch._C._len_torch_dispatch_stack(),
        "global_forward_hooks": len(torch.nn.modules.module._global_forward_hooks),
        "kernels": {
            op: torch._C._dispatch_dump(f"aten::{op}").count("AutocastCPU")
            for op in ("linear", "softmax.int", "upsample_nearest2d.vec", "mean", "exp")
        },
    }


@pytest.fixture(autouse=True)
def torch_is_restored():
    """Design rule 9: every hook, mode, RNG state, flag and registered kernel is restored, whatever is raised."""
    before = torch_state()
    rng = torch.get_rng_state()
    yield
    assert torch_state() == before
    torch.set_rng_state(rng)
