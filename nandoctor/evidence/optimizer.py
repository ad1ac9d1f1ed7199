"""What an optimizer held, and what its update did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nandoctor.evidence.trace import TensorStats


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSlot:
    """One parameter's running mean of squared gradients, counted exactly; its format is that of the weight's step.

    `parameter` is the dotted name, "" where the optimizer's order did not fit the model's. `eps` is added to the root.
    `safe_eps` is the smallest eps tried with which the optimizer's step, taken in the format of the moments, is finite
    and within the bound that exact moments give it; None where none is.
    """

    parameter: str
    eps: float
    moment: TensorStats
    safe_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUpdate:
    """An update that left weights non-finite, while all gradients were finite.

    `optimizer` is its class, "" where the training loop itself wrote. `parameters` maps the dotted names of those
    weights to how many of their values are non-finite, and how many there are. `settings` are the numbers in the
    optimizer's groups (lr, weight_decay, ...). `largest_gradient` is a magnitude, None where the gradients were
    not looked at.
    """

    optimizer: str
    parameters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    largest_gradient: float | None = None
