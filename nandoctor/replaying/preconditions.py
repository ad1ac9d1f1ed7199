"""What has to hold before a replay begins: torch makes real tensors with gradients here, and the step fits into memory.

In: a device's name, torch's modes, a dump's tensors. Out: the device, or an error that says what is in the way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nandoctor.errors import ModelError, NanDoctorError
from nandoctor.machine import available_memory, memory_of
from nandoctor.text import byte_size


def find_device(name: str) -> torch.device:
    """The device to replay on, where the code around the call lets it make tensors with values, and gradients of them.

    Raises:
        NanDoctorError: there is none of that name, inference mode is on, or tensors are made on another device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise NanDoctorError(f"{name!r} is no device to replay on.", remedy="Use --device cpu or --device cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NanDoctorError(
            "This machine has no CUDA device that torch can use.",
            remedy="Leave --device out: the CPU replays a CUDA run with CUDA's own autocast lists.",
        )
    _require_real_tensors(device)
    return device


def _require_real_tensors(device: torch.device) -> None:
    if torch.is_inference_mode_enabled():
        raise NanDoctorError(
            "torch.inference_mode() is on, and a replay runs the backward pass.",
            remedy="Call nandoctor outside of it; torch.no_grad() is no obstacle.",
        )
    default = torch.get_default_device()
    if default.type not in ("cpu", device.type):
        empty = ", where they hold no numbers" if default.type == "meta" else ""
        raise NanDoctorError(
            f"New tensors are made on the device {default.type!r}{empty}, and the replay runs on {str(device)!r}.",
            remedy='Call nandoctor outside of `with torch.device(...)`, and reset torch.set_default_device("cpu").',
        )


def require_memory(
    state: Mapping[str, torch.Tensor], arrays: Mapping[str, torch.Tensor], device: torch.device, *, backward: bool
) -> None:
    """Check that weights, batch and, with `backward`, gradients fit into what is free; what is between them is unknown.

    Raises:
        ModelError: they do not; the message has both figures.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    weights, batch = memory_of(state.values()), memory_of(arrays.values())
    gradients = memory_of(tensor for tensor in state.values() if tensor.is_floating_point()) if backward else 0
    if free is None or weights + batch + gradients <= free:
        return
    parts = [f"weights {byte_size(weights)}", f"batch {byte_size(batch)}"]
    parts += [f"gradients {byte_size(gradients)}"] if gradients else []
    raise ModelError(
        f"The replay takes at least {byte_size(weights + batch + gradients)} of memory ({', '.join(parts)}, and what "
        f"the layers give), and {byte_size(free)} are free on {device.type}. Nothing was built.",
        remedy="Run it where there is more memory, or end what else runs there.",
    )
