"""Copy and measure a training's tensors: this rank's part of each, many in one call, to be read later.

A call of torch for each tensor would be most of the recorder's cost. A flag is computed on a device and read later, so
that the host need not wait for the device. Tensors may be sharded over ranks (FSDP2, tensor parallelism): telling this
rank's part, and its place in the whole, needs no other rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nandoctor.capture.environment import read_rank
from nandoctor.errors import NanDoctorError
from nandoctor.text import dtype_name
from nandoctor.torch_compat import flatten, fsdp_policy, infinity_norms, passing_autograd, shard_offset, sparse_values

_SMALL = 1 << 16
"""Number of elements above which a tensor is measured in place, since joining it would copy it."""
_DENSE = (torch.Tensor, nn.Parameter)


class JoinOrder:
    """An order of tensors that puts those that one `torch.cat` can join next to each other.

    These share a device, a dtype and all of their shape but the first dimension; a large or odd one is joined with no
    other. `places` are their indices in the original sequence. The tensors are not stored: every method takes them
    again, in this order. The methods bypass autograd, which is a third of a join's cost.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds: dict[object, list[int]] = {}
        for place, tensor in enumerate(tensors):
            alone = place if tensor.numel() > _SMALL or not can_join(tensor) else None
            kind = (tensor.device, tensor.dtype, tensor.dim() > 0, tensor.shape[1:], alone)
            kinds.setdefault(kind, []).append(place)
        self.places = tuple(chain(*kinds.values()))
        self._shapes = [[tensors[place].shape for place in kind] for kind in kinds.values()]
        ends = [0, *accumulate(map(len, self._shapes))]
        self._slices = [slice(start, end) for start, end in pairwise(ends)]
        # Flattening a few small tensors is faster than another call of torch.
        self._is_few = len(tensors) <= 8 * len(kinds) and all(tensor.numel() <= _SMALL for tensor in tensors)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Join the tensors in new memory."""
        with torch.no_grad():
            groups = [tensors[part] for part in self._slices]
            return [_join(group) if len(group) > 1 else group[0].detach().clone() for group in groups]

    def split(self, joined: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each tensor as a view of the result of `copy`."""
        for tensor, shapes in zip(joined, self._shapes, strict=True):
            if len(shapes) == 1:
                yield tensor
            else:
                yield from torch.split(tensor, [shape[0] for shape in shapes]) if shapes[0] else tensor.unbind()

    def largest(self, tensors: Sequence[torch.Tensor | None]) -> float | None:
        """Return the largest magnitude of all elements, NaN if one is NaN; None if all tensors are None."""
        bounds: list[float] = []
        with passing_autograd():
            for part in [slice(None)] if self._is_few else self._slices:
                if present := [tensor for tensor in tensors[part] if tensor is not None]:
                    join = flatten if self._is_few else _join
                    low, high = torch.aminmax(present[0] if len(present) == 1 else join(present))
                    bounds += (-low.item(), high.item())
        return math.nan if any(map(math.isnan, bounds)) else max(bounds, default=None)


def can_join(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is strided, not empty, and a plain Tensor or Parameter, not of a subclass."""
    return type(tensor) in _DENSE and tensor.layout is torch.strided and tensor.numel() > 0


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the tensors. Writing into `out` bypasses autocast, which under bf16 refuses to join fp16 tensors."""
    join = torch.cat if tensors[0].dim() else torch.stack
    return join(tensors, out=tensors[0].new_empty(0))  # type: ignore[arg-type]


def plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor: the values of a sparse or nested one, this rank's part of a sharded one."""
    if can_join(tensor):
        return tensor
    local = local_part(tensor)
    return sparse_values(local) if local.layout is not torch.strided else local


def largest_magnitude(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest magnitude of all floating-point or complex elements as a scalar on their device.

    It is NaN if one of them is NaN; None if there are none.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for plain in map(plain_part, tensors):
        real = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        if real.numel() and real.is_floating_point():
            groups.setdefault((real.device, real.dtype), []).append(real)
    if not groups:
        return None
    with torch.no_grad():
        found = [torch.stack(infinity_norms(group)).amax() for group in groups.values()]
        wide = torch.float64 if any(bound.dtype == torch.float64 for bound in found) else torch.float32
        bounds = [bound.to(found[0].device, wide) for bound in found]
        return bounds[0] if len(bounds) == 1 else torch.stack(bounds).amax()


class Flag:
    """Magnitudes that are found on a device and copied to the host in the background, from when the flag is made.

    `values` waits for that copy only, not for work queued after it.
    """

    __slots__ = ("_event", "_host", "_values")

    def __init__(self, magnitudes: torch.Tensor | float) -> None:
        self._event: Any = None
        self._host: torch.Tensor | None = None
        if isinstance(magnitudes, torch.Tensor) and magnitudes.is_cuda:
            self._host = torch.empty(magnitudes.shape, dtype=magnitudes.dtype, pin_memory=True)
            self._host.copy_(magnitudes, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(magnitudes.device))
        else:
            self._values = _read(magnitudes)

    @property
    def on_device(self) -> bool:
        """True if reading the flag may wait for the device."""
        return self._event is not None

    @property
    def ready(self) -> bool:
        """True if the flag can be read without waiting."""
        return self._event is None or bool(self._event.query())

    @property
    def nonfinite(self) -> bool:
        """True if a magnitude is NaN or infinite, on this rank or another."""
        return not all(map(math.isfinite, self.values()))

    def values(self) -> list[float]:
        """Return the magnitudes, of this rank and then of each; waits for the copy."""
        if self._host is not None:
            self._event.synchronize()
            self._values, self._host = _read(self._host), None
        return self._values


def _read(magnitudes: torch.Tensor | float) -> list[float]:
    numbers = magnitudes.tolist() if isinstance(magnitudes, torch.Tensor) else magnitudes
    return numbers if isinstance(numbers, list) else [float(numbers)]


def flag_magnitude(magnitude: torch.Tensor | float | None, device: torch.device, *, ask_all: bool) -> Flag:
    """Return a magnitude as a flag, 0 if there is none.

    With `ask_all` under torch.distributed those of all ranks follow, inf for NaN; every rank must ask at the same step.
    """
    here = 0.0 if magnitude is None else magnitude
    rank, world_size = read_rank()
    if not ask_all or world_size == 1:
        return Flag(here)
    magnitudes = torch.zeros(1 + world_size, dtype=torch.float64, device=device)
    magnitudes[0] = here
    magnitudes[1 + rank] = torch.as_tensor(here).nan_to_num(math.inf, math.inf)  # MAX is undefined for NaN
    dist.all_reduce(magnitudes[1:], op=dist.ReduceOp.MAX)
    return Flag(magnitudes)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor."""
    # Importing the module takes a second. If nobody has imported it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_unknown(model: nn.Module) -> None:
    """Raise TypeError or NanDoctorError for wrappers whose weights or steps a recorder cannot follow."""
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
    modules = dict(model.named_modules())
    policies = {path: policy for path, module in modules.items() if (policy := fsdp_policy(module)) is not None}
    held = ((path, named) for path in policies for named in modules[path].named_parameters(prefix=path))
    owners = {name: path for path, (name, p) in held if is_sharded(p) and p.is_floating_point()}  # the innermost last
    cast = {
        "parameters": {name: policies[path].param_dtype for name, path in owners.items()},
        "inputs": {path: policy.param_dtype for path, policy in policies.items() if policy.cast_forward_inputs},
        "outputs": {path: policy.output_dtype for path, policy in policies.items()},
        "gradients": {path: policy.reduce_dtype for path, policy in policies.items()},
    }
    return {what: {name: dtype_name(dtype) for name, dtype in of.items() if dtype} for what, of in cast.items()}
