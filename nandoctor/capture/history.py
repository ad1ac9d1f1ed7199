"""The steps that went wrong lately, and what that calls for.

In: one `StepResult` after another. Out: whether to save a dump, and whether to stop, and why.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

SMALLEST_SCALE = 1.0
"""A gradient that overflows at a loss scale below this overflows by itself. Above it halving the scale is the cure, and
GradScaler applies it: that is its warm-up, and the skip that follows each growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step came to.

    `loss_bad`: the loss (or the output, where no loss was given) is non-finite. `skipped`: GradScaler left the step
    out. Neither implies the other. `loss_scale` is the scale of this step, None without a scaler.
    """

    step: int
    loss_bad: bool
    skipped: bool = False
    loss_scale: float | None = None

    @property
    def skip_counts(self) -> bool:
        """Whether it was skipped and halving the loss scale is no excuse for that."""
        return self.skipped and self.loss_scale is not None and self.loss_scale < SMALLEST_SCALE

    @property
    def bad(self) -> bool:
        """Whether this step is worth a dump."""
        return self.loss_bad or self.skip_counts

    @property
    def reason(self) -> Literal["loss", "skipped"]:
        """What was wrong, the loss first."""
        return "loss" if self.loss_bad else "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When to stop: more than the share `threshold` of the last `window` steps bad, or `in_a_row` bad ones in a row.

    The share is that of the whole window, also while fewer steps were seen. Non-finite losses and skipped steps each
    have their own share.
    """

    threshold: float = 0.1
    window: int = 100
    in_a_row: int | None = None


class History:
    """The last steps of a run."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.num_steps = 0
        self.num_bad_losses = 0
        self.num_skipped = 0
        self._recent: deque[StepResult] = deque(maxlen=rule.window)
        self._num_in_a_row = 0

    def add(self, result: StepResult) -> None:
        """Note a step."""
        self.num_steps += 1
        self.num_bad_losses += result.loss_bad
        self.num_skipped += result.skipped
        self._recent.append(result)
        self._num_in_a_row = self._num_in_a_row + 1 if result.bad else 0

    @property
    def begins_episode(self) -> bool:
        """Whether the last step is the first bad one within the window."""
        return bool(self._recent) and self._recent[-1].bad and sum(result.bad for result in self._recent) == 1

    def why_stop(self) -> str | None:
        """The reason to stop after the last step; None to go on."""
        rule = self.rule
        if rule.in_a_row is not None and self._num_in_a_row >= rule.in_a_row:
            return f"{self._num_in_a_row} non-finite step{'s in a row' if rule.in_a_row > 1 else ''}"
        most = rule.threshold * rule.window
        losses = sum(result.loss_bad for result in self._recent)
        skips = sum(result.skip_counts for result in self._recent)
        if losses > most:
            return f"the loss was non-finite in {losses} of the last {len(self._recent)} steps"
        if skips > most:
            return f"the scaler skipped {skips} of the last {len(self._recent)} steps at a loss scale below 1"
        return None

    def to_plain(self) -> dict[str, object]:
        """Counts over the whole run, and the bad and the skipped steps of the window, for the dump."""
        return {
            "num_steps": self.num_steps,
            "num_bad_losses": self.num_bad_losses,
            "num_skipped": self.num_skipped,
            "recent_bad_losses": [result.step for result in self._recent if result.loss_bad],
            "recent_skipped": [result.step for result in self._recent if result.skipped],
        }
