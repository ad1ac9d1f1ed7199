"""Reads the second moments of an adaptive optimizer, whose next step divides by their roots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from nandoctor.dumps.stored_tensor import is_dense, is_tensor
from nandoctor.text import dtype_name

if TYPE_CHECKING:
    import torch

_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Their names in torch.optim: in the amsgrad variants; in Adam, AdamW, NAdam and RAdam; in RMSprop; in Adagrad. The root
# is taken of the first one that is there.
_NAMES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment:
    """The running mean of the squared gradients of one parameter.

    `index` counts the optimizer's parameters from 0; `name` is the parameter's if the optimizer was given names, else
    "". `eps` is what the optimizer adds to the root, in the format of `values`. `decay` is the mean's, 0 for a sum.
    """

    index: int
    name: str
    eps: float
    values: torch.Tensor
    decay: float = 0.0


def read_second_moments(optimizer: Mapping[object, object]) -> tuple[SecondMoment, ...]:
    """Return the second moments in the state dict of an optimizer, in its order; malformed entries are skipped.

    torch lets a parameter be in one group only, so further mentions of it are skipped too. Fused optimizers are left
    out: their kernels keep root and eps in fp32, whatever the format of the weights.
    """
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return ()
    first: dict[int, SecondMoment] = {}
    for group in (group for group in groups if isinstance(group, Mapping)):
        for moment in _of_group(group, state):
            first.setdefault(moment.index, moment)
    return tuple(first.values())


def read_eps(optimizer: Mapping[object, object]) -> tuple[float, ...]:
    """Return the eps of each parameter group that has one, also before the first step and for fused optimizers."""
    groups = optimizer.get("param_groups")
    found = [group.get("eps") for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    return tuple(eps for eps in found if isinstance(eps, float))


def _of_group(group: Mapping[object, object], state: Mapping[object, object]) -> Iterator[SecondMoment]:
    eps, indices, names = group.get("eps"), group.get("params"), group.get("param_names")
    if not isinstance(eps, float) or not isinstance(indices, list) or group.get("fused") is True:
        return
    for position, index in enumerate(indices):
        slots = state.get(index) if isinstance(index, int) else None
        if not isinstance(slots, Mapping):
            continue
        values = next((slots[name] for name in _NAMES if is_tensor(slots.get(name))), None)
        if _is_real(values):
            name = names[position] if isinstance(names, list) and position < len(names) else ""
            named = name if isinstance(name, str) else ""
            yield SecondMoment(index=index, name=named, eps=eps, values=values, decay=_decay(group))


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return is_dense(value) and dtype_name(value.dtype) in _DTYPES


def _decay(group: Mapping[object, object]) -> float:
    """Return Adam's second beta, or RMSprop's alpha; 0 for Adagrad, which sums without decay."""
    betas = group.get("betas")
    decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else group.get("alpha")
    return decay if isinstance(decay, float) and 0 <= decay < 1 else 0.0
