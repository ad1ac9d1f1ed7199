"""Torch's switches that decide which kernel runs, by the names that a dump keeps them under."""

from __future__ import annotations

BACKENDS: dict[str, tuple[str, str]] = {
    "flash_sdp": ("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
    "mem_efficient_sdp": ("backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
    "math_sdp": ("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp"),
    "cudnn_sdp": ("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp"),
    "float32_matmul_precision": ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    "cudnn_allow_tf32": ("backends.cudnn.allow_tf32", "backends.cudnn.allow_tf32"),
    "deterministic_algorithms": ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    "num_threads": ("get_num_threads", "set_num_threads"),
}
