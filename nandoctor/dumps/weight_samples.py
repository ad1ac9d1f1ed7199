"""A few values of each weight, by which it is told later whether a checkpoint holds the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nandoctor.dumps.recorded_format import MAX_SAMPLED, WeightSample


def sample_weights(state: Mapping[str, torch.Tensor]) -> dict[str, WeightSample]:
    """Up to 64 values of each dense tensor, spread over it, on the CPU."""
    plain = {
        name: tensor for name, tensor in state.items() if tensor.layout is torch.strided and not tensor.is_quantized
    }
    return {name: _sample(tensor.detach()) for name, tensor in plain.items()}


def _sample(tensor: torch.Tensor) -> WeightSample:
    num_taken = min(tensor.numel(), MAX_SAMPLED)
    at = torch.arange(num_taken, dtype=torch.float64).mul(tensor.numel() / max(num_taken, 1)).long()
    places = torch.unravel_index(at.to(tensor.device), tensor.shape) if tensor.dim() else ()
    values = tensor[places] if tensor.dim() else tensor.reshape(1)
    return WeightSample(at=at, values=values.cpu().clone())


def describe_samples(samples: Mapping[str, WeightSample]) -> dict[str, Any]:
    """The samples as plain data and tensors."""
    return {name: {"at": sample.at, "values": sample.values} for name, sample in samples.items()}
