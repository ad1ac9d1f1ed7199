"""Change a setting of the training: the format of autocast, the loss scale, the optimizer's eps."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from nandoctor.evidence.edits import SingleEdit, kind_of_change
from nandoctor.evidence.formats import BF16, FloatFormat
from nandoctor.evidence.report import FixSettings
from nandoctor.text import constant

WHOLE = 1000
"""The size of a change of everything."""


@kind_of_change
class UseFormat(SingleEdit):
    """Run everything in another format: bf16 has the range of fp32; fp32 and fp64 switch autocast off.

    The engine runs the step under another policy.
    """

    size: ClassVar[int] = WHOLE

    kind: Literal["use-format"] = "use-format"
    format: FloatFormat

    @property
    def title(self) -> str:
        return f"Run the step under {self.format.label} autocast"

    def set_in(self, settings: FixSettings) -> FixSettings | None:
        """Set autocast's dtype to bf16; no training is told to use another."""
        return replace(settings, amp_dtype="bfloat16") if self.format is BF16 else None


@kind_of_change
class SetLossScale(SingleEdit):
    """Multiply the loss by another number before the backward pass."""

    size: ClassVar[int] = 5
    why: ClassVar[str] = (
        "That skips fewer steps at the start. A GradScaler raises its scale again: then it skips a step, as it should."
    )

    kind: Literal["loss-scale"] = "loss-scale"
    value: float

    @property
    def title(self) -> str:
        return f"Lower the loss scale to {self.value:g}"

    def set_in(self, settings: FixSettings) -> FixSettings:
        return replace(settings, loss_scale=self.value)


@kind_of_change
class SetOptimizerEps(SingleEdit):
    """Set the optimizer's eps."""

    kind: Literal["optimizer-eps"] = "optimizer-eps"
    value: float

    @property
    def title(self) -> str:
        return f"Give the optimizer an eps of {constant(self.value)}"
