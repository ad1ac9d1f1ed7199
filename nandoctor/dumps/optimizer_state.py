"""Reads the second moments of an adaptive optimizer, whose next step divides by their roots."""

from __future__ import annotations

import math
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
    "". `eps` is what the optimizer adds to the root, in the format of `values`. `first` is the running mean of the
    gradients, if there is one, `step` the number of steps, and `decays` those of the two means (0 for a sum).
    """

    index: int
    name: str
    eps: float
    values: torch.Tensor
    first: torch.Tensor | None = None
    step: int = 1
    decays: tuple[float, float] = (0.0, 0.0)


def read_second_moments(optimizer: Mapping[object, object]) -> tuple[SecondMoment, ...]:
    """Return the second moments in the state dict of an optimizer, in its order; malformed entries are skipped.

    torch lets a parameter be in one group only, so further mentions of it are skipped too. Fused optimizers are left
    out: their kernels keep root and eps in fp32, whatever the format of the weights.
    """
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return ()
    found = (moment for group in groups if isinstance(group, Mapping) for moment in _of_group(group, state))
    first: dict[int, SecondMoment] = {}
    for moment in found:
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
    known = {index: position for position, index in reversed([*enumerate(indices)]) if isinstance(index, int)}
    for index, position in sorted(known.items(), key=lambda item: item[1]):
        slots = state.get(index)
        if not isinstance(slots, Mapping):
            continue
        values = next((slots[name] for name in _NAMES if is_tensor(slots.get(name))), None)
        if _is_real(values):
            name = names[position] if isinstance(names, list) and position < len(names) else ""
            first = slots.get("exp_avg")
            yield SecondMoment(
                index=index,
                name=name if isinstance(name, str) else "",
                eps=eps,
                values=values,
                first=first if _is_real(first) and first.shape == values.shape else None,
                step=_step(slots),
                decays=_decays(group),
            )


def _is_real(value: object) -> TypeGuard[torch.Tensor]:
    return is_dense(value) and dtype_name(value.dtype) in _DTYPES


def _step(slots: Mapping[str, object]) -> int:
    step = slots.get("step")
    if is_tensor(step):
        step = step.item() if is_dense(step) and step.numel() == 1 else 1
    return max(int(step), 1) if isinstance(step, (int, float)) and math.isfinite(step) else 1


def _decays(group: Mapping[object, object]) -> tuple[float, float]:
    """Return Adam's betas, or 0 and RMSprop's alpha; zeros for Adagrad, which sums without decay."""
    betas = group.get("betas", (0.0, group.get("alpha", 0.0)))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return 0.0, 0.0
    are_shares = all(isinstance(beta, float) and 0 <= beta < 1 for beta in betas)
    return (betas[0], betas[1]) if are_shares else (0.0, 0.0)
