"""Reads the second moments of an adaptive optimizer, whose next step divides by their roots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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

    index: int = 0
    name: str
    eps: float
    values: torch.Tensor
    decay: float = 0.0


def read_second_moments(state: object, groups: object) -> tuple[SecondMoment, ...]:
    """Return the second moments in an optimizer's state, in its order; malformed entries are skipped.

    State and groups name the parameters by their numbers, as a state dict does, or by their names. torch lets a
    parameter be in one group only, so further mentions of it are skipped too. Fused optimizers are left out: their
    kernels keep root and eps in fp32, whatever the format of the weights.
    """
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return ()
    first: dict[int | str, SecondMoment] = {}
    for group in (group for group in groups if isinstance(group, Mapping)):
        for key, moment in _of_group(group, state):
            first.setdefault(key, moment)
    return tuple(
        replace(moment, index=key if isinstance(key, int) else number)
        for number, (key, moment) in enumerate(first.items())
    )


def _of_group(
    group: Mapping[object, object], state: Mapping[object, object]
) -> Iterator[tuple[int | str, SecondMoment]]:
    eps, keys, names = group.get("eps"), group.get("params"), group.get("param_names")
    betas = group.get("betas")  # of Adam; RMSprop has an alpha, and Adagrad sums without decay
    decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else group.get("alpha")
    decay = decay if isinstance(decay, float) and 0 <= decay < 1 else 0.0
    if not isinstance(eps, float) or not isinstance(keys, list) or group.get("fused") is True:
        return
    for position, key in enumerate(keys):
        slots = state.get(key) if isinstance(key, (int, str)) else None
        if not isinstance(slots, Mapping):
            continue
        values = next((slots[name] for name in _NAMES if is_tensor(slots.get(name))), None)
        if is_dense(values) and dtype_name(values.dtype) in _DTYPES:
            name = names[position] if isinstance(names, list) and position < len(names) else key
            named = name if isinstance(name, str) else ""
            yield key, SecondMoment(name=named, eps=eps, values=values, decay=decay)
