"""What has to hold before a replay begins: torch makes real tensors with gradients here.

In: a device's name, torch's modes. Out: the device, or an error that says what is in the way.
"""

from __future__ import annotations

import torch

from nandoctor.errors import NanDoctorError


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
