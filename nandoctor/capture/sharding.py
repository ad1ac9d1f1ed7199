"""Tensors that are sharded over ranks (FSDP2, tensor parallelism): this rank's part, and its place in the whole.

Nothing here communicates with another rank.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from nandoctor.errors import NanDoctorError
from nandoctor.text import dtype_name
from nandoctor.torch_compat import fsdp_policy, shard_offset


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor."""
    # Importing the module takes a second. If nobody has imported it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_unknown(model: nn.Module) -> None:
    """Raise for wrappers whose weights or steps a recorder cannot follow.

    Raises:
        NanDoctorError: a part of the model is wrapped in FSDP1, which keeps the weights of many layers in one tensor.
        TypeError: the model is an engine of DeepSpeed, which has its own gradients, weights and steps.
    """
    if type(model).__module__.partition(".")[0] == "deepspeed":
        raise TypeError("DeepSpeed's engine has its own gradients and updates, which the recorder does not know")
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, wrapper) for module in model.modules()):
        raise NanDoctorError(
            "FullyShardedDataParallel (FSDP1) keeps weights in flat pieces, from which a replay cannot build a model.",
            remedy="Shard with FSDP2 instead: `for block in model.blocks: fully_shard(block)`, then "
            "`fully_shard(model)` and Recorder(model), with fully_shard from torch.distributed.fsdp.",
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor as a plain tensor that shares its memory."""
    held: Any = tensor
    local = held.to_local() if is_sharded(tensor) else tensor
    assert isinstance(local, torch.Tensor)
    return local.detach()


def describe_shard(tensor: Any) -> dict[str, Any]:
    """Return a sharded tensor's full shape, and the indices of the first element of this rank's part in it.

    These are missing, and nothing can join the parts, if FSDP splits what tensor parallelism has split already.
    """
    is_split_again = any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements)
    return {"shape": list(tensor.shape), "offset": [] if is_split_again else shard_offset(tensor)}


def describe_mixed_precision(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return the dtypes that FSDP2's policies cast to: of weights by name, of the rest by module path.

    The rest are inputs, outputs, and the gradients while they are summed over ranks. A weight's policy is that of the
    nearest enclosing module that `fully_shard` was called on. Weights in its `ignored_params` are neither sharded nor
    cast.
    """
    policies = {path: policy for path, module in model.named_modules() if (policy := fsdp_policy(module)) is not None}
    sharded = [(name, p) for name, p in model.named_parameters() if is_sharded(p)] if policies else []
    owned = [(name, _owner(name, policies)) for name, p in sharded if p.is_floating_point()]
    cast = {
        "parameters": {name: policies[path].param_dtype for name, path in owned if path is not None},
        "inputs": {path: policy.param_dtype for path, policy in policies.items() if policy.cast_forward_inputs},
        "outputs": {path: policy.output_dtype for path, policy in policies.items()},
        "gradients": {path: policy.reduce_dtype for path, policy in policies.items()},
    }
    return {what: {name: dtype_name(dtype) for name, dtype in of.items() if dtype} for what, of in cast.items()}


def _owner(name: str, paths: Collection[str]) -> str | None:
    """Return the innermost of these modules that contains the weight; None if none does."""
    parts = name.split(".")
    outer = (".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1))
    return next((path for path in outer if path in paths), None)
