"""A small grey picture of the sample at fault, to lay a map of the damage over."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from nandoctor.evidence.exhibits import Picture

_MAX_SIDE = 64
_MIN_SIDE = 8
_CHANNELS = (1, 2, 3, 4)


def take_picture(arrays: Mapping[str, torch.Tensor], sample: int) -> Picture | None:
    """The first array that is a batch of images, channels first, at this sample: averaged, shrunk and stretched."""
    for name, array in arrays.items():
        if _is_image(array) and sample < array.shape[0]:
            return _shrink(name, array[sample], sample)
    return None


def _is_image(array: torch.Tensor) -> bool:
    large = array.dim() == 4 and min(array.shape[2:]) >= _MIN_SIDE
    return large and array.shape[1] in _CHANNELS and not array.is_complex()


def _shrink(name: str, image: torch.Tensor, sample: int) -> Picture:
    grey = torch.nan_to_num(image.double(), 0.0, 0.0, 0.0).mean(0)
    height, width = (min(side, _MAX_SIDE) for side in grey.shape)
    small = F.adaptive_avg_pool2d(grey[None, None], (height, width))[0, 0]
    low, high = torch.aminmax(small)
    levels = (small - low) * (255.0 / max(float(high - low), 1e-300))
    pixels = levels.clamp(0, 255).to(torch.uint8).cpu().numpy().tobytes()
    return Picture(name=name, sample=sample, height=height, width=width, pixels=base64.b64encode(pixels).decode())
