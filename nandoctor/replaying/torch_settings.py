"""The settings of torch that code changes for the whole process or thread, read and written together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from nandoctor import torch_compat


def read_torch_settings() -> dict[str, Any]:
    """Every setting, as this thread has it now."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def write_torch_settings(settings: Mapping[str, Any]) -> None:
    """Set what differs from `settings`."""
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)


def _write_device(device: torch.device) -> None:
    # Where nobody had set one torch tells "cpu", and to set that would put a mode in the way of every call.
    torch.set_default_device(None if device.type == "cpu" else device)


def _read_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_determinism(setting: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])


def _read_anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _write_anomaly(setting: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*setting)


def _flushes_denormals() -> bool:
    """Torch can set this and not tell it: the smallest normal double, halved, is subnormal."""
    return float(torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64, device="cpu") / 2) == 0


def _read_autocast() -> tuple[Any, ...]:
    states = ((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda"))
    return (*states, torch.is_autocast_cache_enabled())


def _write_autocast(setting: tuple[Any, ...]) -> None:
    *states, caches = setting
    for name, (enabled, dtype) in zip(("cpu", "cuda"), states, strict=True):
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(caches)


def _read_products() -> tuple[str | None, ...]:
    return (_read_legacy_products(), *(attrgetter(place)(torch.backends).fp32_precision for place in _FP32_PRODUCTS))


def _read_legacy_products() -> str | None:
    # torch refuses to read the old setting where both are in use:
    # https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _write_products(setting: tuple[str | None, ...]) -> None:
    legacy, *precisions = setting
    if legacy is not None and legacy != _read_legacy_products():  # which changes some of the others
        torch.set_float32_matmul_precision(legacy)
    for place, precision in zip(_FP32_PRODUCTS, precisions, strict=True):
        backend = attrgetter(place)(torch.backends)
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _write_print_options(options: Mapping[str, Any]) -> None:
    torch.set_printoptions(**options)  # type: ignore[no-untyped-call]


def _of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_FP32_PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_CUDA = torch.backends.cuda
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _write_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_read_autocast, _write_autocast),
    "deterministic algorithms": (_read_determinism, _write_determinism),
    "anomaly detection": (_read_anomaly, _write_anomaly),
    "flushed denormals": (_flushes_denormals, torch.set_flush_denormal),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision of fp32 products": (_read_products, _write_products),
    "cuDNN": _of(torch.backends.cudnn, "enabled"),
    "cuDNN's search": _of(torch.backends.cudnn, "benchmark"),
    "deterministic cuDNN": _of(torch.backends.cudnn, "deterministic"),
    "oneDNN": _of(torch.backends.mkldnn, "enabled"),
    "flash attention": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient attention": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "attention by reference math": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "print options": (torch_compat.print_options, _write_print_options),
}
