"""The first affected sample in a form to look at: a small grey image, curves, or token ids."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from nandoctor.evidence.exhibits import Picture, SampleView, Signal, TokenIds

_MAX_SIDE = 64
_MIN_SIDE = 8
_IMAGE_CHANNELS = (1, 2, 3, 4)
_MIN_LENGTH, _MAX_PIECES = 16, 256
_MAX_CHANNELS, _MAX_CURVES = 8, 4
_MAX_IDS = 256


def view_sample(arrays: Mapping[str, torch.Tensor], sample: int) -> SampleView | None:
    """The sample of the first array that can be looked at; None where there is none."""
    for name, array in arrays.items():
        if array.dim() < 2 or sample >= array.shape[0] or array.is_complex() or _is_mask(array):
            continue
        view = _view_image(name, array, sample) or _view_ids(name, array, sample) or _view_signal(name, array, sample)
        if view is not None:
            return view
    return None


def _is_mask(array: torch.Tensor) -> bool:
    """Tell whether an array that is no image holds nothing but zeros and ones."""
    return array.dim() < 4 and bool(((array == 0) | (array == 1)).all())


def _view_image(name: str, array: torch.Tensor, sample: int) -> Picture | None:
    """An image, channels first: averaged over the channels, shrunk, and stretched to 256 grey levels."""
    if array.dim() != 4 or min(array.shape[2:]) < _MIN_SIDE or array.shape[1] not in _IMAGE_CHANNELS:
        return None
    image = array[sample].double()
    finite = image[image.isfinite()]
    grey = torch.nan_to_num(image, 0.0, 0.0, 0.0).mean(0)
    height, width = (min(side, _MAX_SIDE) for side in grey.shape)
    small = F.adaptive_avg_pool2d(grey[None, None], (height, width))[0, 0]
    low, high = torch.aminmax(small)
    levels = (small - low) * (255.0 / max(float(high - low), 1e-300))
    pixels = levels.clamp(0, 255).to(torch.uint8).cpu().numpy().tobytes()
    return Picture(
        name=name,
        sample=sample,
        low=float(finite.min()) if len(finite) else None,
        high=float(finite.max()) if len(finite) else None,
        num_bad=image.numel() - len(finite),
        height=height,
        width=width,
        pixels=base64.b64encode(pixels).decode(),
    )


def _view_ids(name: str, array: torch.Tensor, sample: int) -> TokenIds | None:
    if array.dim() != 2 or array.dtype not in (torch.int32, torch.int64) or bool((array[sample] < 0).any()):
        return None
    ids = array[sample]
    return TokenIds(name=name, sample=sample, length=len(ids), ids=tuple(ids[:_MAX_IDS].tolist()))


def _view_signal(name: str, array: torch.Tensor, sample: int) -> Signal | None:
    """A few curves along the longer dimension, each cut into pieces that keep its limits."""
    if array.dim() > 3:
        return None
    channels = array[sample].double().reshape(-1 if array.dim() == 3 else 1, array.shape[-1])
    dim = 1 if channels.shape[0] > channels.shape[1] or array.dim() == 2 else 2
    channels = channels.T if channels.shape[0] > channels.shape[1] else channels
    num_channels, length = channels.shape
    if length < _MIN_LENGTH or num_channels > _MAX_CHANNELS:
        return None
    curves = [channel.tensor_split(min(length, _MAX_PIECES)) for channel in channels[:_MAX_CURVES]]
    return Signal(
        name=name,
        sample=sample,
        dim=dim,
        length=length,
        num_channels=num_channels,
        lows=tuple(tuple(_limit(piece, piece.min()) for piece in curve) for curve in curves),
        highs=tuple(tuple(_limit(piece, piece.max()) for piece in curve) for curve in curves),
    )


def _limit(piece: torch.Tensor, limit: torch.Tensor) -> float | None:
    return float(limit) if bool(piece.isfinite().all()) else None
