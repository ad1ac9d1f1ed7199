"""Tensors that are spread over ranks (FSDP2, tensor parallelism): this rank's part, and where it belongs.

In: the tensors of a model. Out: plain tensors, and what a reader needs to join the files of all ranks. Nothing here
talks to another rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nandoctor.torch_compat import fsdp_parameter_dtype


def is_sharded(tensor: torch.Tensor) -> bool:
    """True of a DTensor."""
    # Who never imported the module has none, and it takes a second to import.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of the tensor, as a plain one that shares its memory."""
    held: Any = tensor
    local = held.to_local() if is_sharded(tensor) else tensor
    assert isinstance(local, torch.Tensor)
    return local.detach()


def describe_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Of each sharded tensor its whole shape, the mesh of ranks, and its placement along each dimension of the mesh.

    A placement is the dimension that the tensor is split along, or None where every rank has it whole. Any other (a sum
    that is still to be made, a split by strides) is given by its name, and cannot be joined.
    """
    return {name: _describe(tensor) for name, tensor in tensors.items() if is_sharded(tensor)}


def _describe(tensor: Any) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "ranks": tensor.device_mesh.mesh.tolist(),
        "placements": [_describe_placement(placement) for placement in tensor.placements],
    }


def _describe_placement(placement: Any) -> int | str | None:
    if placement.is_replicate():
        return None
    return int(placement.dim) if type(placement).__name__ == "Shard" else str(placement)


def describe_mixed_precision(model: nn.Module) -> list[str]:
    """What a replay does not repeat: FSDP2 may cast weights and inputs by a policy of its own, without autocast."""
    names = {str(dtype).removeprefix("torch.") for module in model.modules() if (dtype := fsdp_parameter_dtype(module))}
    return [f"mixed precision: FSDP's policy cast the weights to {name}, which a replay does not" for name in names]
