"""What an adaptive optimizer's next step divides by, as numbers.

In: what the engine measured. Out: `OptimizerSlot`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
