"""Decides what each finished step calls for: nothing, a dump, or the end of the training.

In: recorded steps whose flags have arrived. Out: files, lines in the log, `NonFiniteTrainingError`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nandoctor.capture.environment import read_rank
from nandoctor.capture.source_info import write_command
from nandoctor.capture.step import RecordedStep
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import NonFiniteTrainingError

LOG = logging.getLogger("nandoctor")

SMALLEST_SCALE = 1.0
"""A gradient that overflows at a loss scale below this overflows without any scaling. Above it halving the scale is the
remedy, and GradScaler applies it: that is its warm-up, and the skip that follows each growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one step.

    `loss_nonfinite`: the loss (or the output, where no loss was given) is non-finite. `skipped`: GradScaler left the
    step out. Neither implies the other. `loss_scale` is the scale of this step, None without a scaler.
    """

    step: int
    loss_nonfinite: bool
    skipped: bool = False
    loss_scale: float | None = None

    @property
    def skip_counts(self) -> bool:
        """True if it was skipped at a loss scale that halving cannot explain."""
        return self.skipped and self.loss_scale is not None and self.loss_scale < SMALLEST_SCALE

    @property
    def failed(self) -> bool:
        """True if this step is worth a dump."""
        return self.loss_nonfinite or self.skip_counts

    @property
    def reason(self) -> Literal["loss", "skipped"]:
        """What was wrong, the loss first."""
        return "loss" if self.loss_nonfinite else "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When to stop: more than the share `threshold` of the last `window` steps failed, or `in_a_row` consecutive ones.

    The share is that of the whole window, also while fewer steps were seen. Non-finite losses and skipped steps each
    have their own share.
    """

    threshold: float = 0.1
    window: int = 100
    in_a_row: int | None = None


class StepHistory:
    """Counts over the whole run, and the results of its last steps."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.num_steps = 0
        self.num_bad_losses = 0
        self.num_skipped = 0
        self._recent: deque[StepResult] = deque(maxlen=rule.window)
        self._num_in_a_row = 0

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_bad_losses += result.loss_nonfinite
        self.num_skipped += result.skipped
        self._recent.append(result)
        self._num_in_a_row = self._num_in_a_row + 1 if result.failed else 0

    @property
    def begins_episode(self) -> bool:
        """True if the last step is the first failed one within the window."""
        return bool(self._recent) and self._recent[-1].failed and sum(result.failed for result in self._recent) == 1

    def why_stop(self) -> str | None:
        """The reason to stop after the last step; None to go on."""
        rule = self.rule
        if rule.in_a_row is not None and self._num_in_a_row >= rule.in_a_row:
            return f"{self._num_in_a_row} non-finite step{'s in a row' if rule.in_a_row > 1 else ''}"
        most = rule.threshold * rule.window
        losses = sum(result.loss_nonfinite for result in self._recent)
        skips = sum(result.skip_counts for result in self._recent)
        if losses > most:
            return f"the loss was non-finite in {losses} of the last {len(self._recent)} steps"
        if skips > most:
            return f"the scaler skipped {skips} of the last {len(self._recent)} steps at a loss scale below 1"
        return None

    def to_plain(self) -> dict[str, object]:
        """Counts over the whole run, and the non-finite and the skipped steps of the window, for the dump."""
        return {
            "num_steps": self.num_steps,
            "num_bad_losses": self.num_bad_losses,
            "num_skipped": self.num_skipped,
            "recent_bad_losses": [result.step for result in self._recent if result.loss_nonfinite],
            "recent_skipped": [result.step for result in self._recent if result.skipped],
        }


class DumpFolder:
    """The files of one run: the last `keep`, none larger than `max_nbytes`; other files are left alone."""

    def __init__(self, folder: Path, *, keep: int, max_nbytes: int) -> None:
        self.folder = folder
        self.written: list[Path] = []
        self._keep, self._max_nbytes = keep, max_nbytes

    def write(self, contents: Mapping[str, Any], stem: str) -> Path:
        """Write a file, and delete the oldest beyond `keep`.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        path = write_dump(contents, self.folder, stem, max_nbytes=self._max_nbytes)
        self.written.append(path)
        while len(self.written) > self._keep:
            with suppress(OSError):
                self.written[0].unlink(missing_ok=True)
            del self.written[0]
        return path


MakeContents = Callable[[RecordedStep, StepResult, str], Mapping[str, Any]]


class StepPolicy:
    """Counts finished steps, saves the first failed one of each episode, and stops the training by its rule."""

    def __init__(self, history: StepHistory, folder: DumpFolder, make_contents: MakeContents) -> None:
        self.history = history
        self.folder = folder
        self._make_contents = make_contents

    def decide(self, step: RecordedStep, *, may_stop: bool) -> None:
        """Count the step, and write it if it begins an episode or ends the training.

        Raises:
            NonFiniteTrainingError: the rule says to stop, and `may_stop` is set.
        """
        step.decided = True
        result = _sum_up(step)
        self.history.add(result)
        if not result.failed:
            return
        why = self.history.why_stop()
        if not why and not self.history.begins_episode:
            return
        saved = self._save(step, result, "stopped" if why else "first")
        if why and may_stop:
            message = f"The recorder stopped the training at step {step.step}: {why}."
            raise NonFiniteTrainingError(message, remedy=saved)
        LOG.warning("Step %d: %s. %s", step.step, _describe(result, step), saved)

    def _save(self, step: RecordedStep, result: StepResult, event: str) -> str:
        """Write the step; the outcome in a sentence that says what to do next.

        Whatever goes wrong is a line in the log: nothing of the recorder's may end a training.
        """
        if step.before is None:
            return "The model was not called in this step, so there is nothing to save."
        rank, world_size = read_rank()
        stem = f"nan-step{step.step:06d}" + (f"-rank{rank}" if world_size > 1 else "")
        try:
            contents = self._make_contents(step, result, event)
            path = self.folder.write(contents, stem)
        except Exception as error:
            folder = self.folder.folder
            LOG.warning("nandoctor could not save %s in %s (%s: %s).", stem, folder, type(error).__name__, error)
            return "It could not be saved; the log says why."
        return f"Saved to {path}; next: {write_command(path, contents['model'])}"


def _sum_up(step: RecordedStep) -> StepResult:
    skipped = step.was_skipped
    # The scale is read from the device only where it matters.
    scale = float(step.scale) if skipped and step.scale is not None else None
    return StepResult(step=step.step, loss_nonfinite=step.loss_nonfinite, skipped=skipped, loss_scale=scale)


def _describe(result: StepResult, step: RecordedStep) -> str:
    if result.reason == "skipped":
        return f"the gradients are non-finite at a loss scale of {result.loss_scale:g}, and the scaler skipped the step"
    what = "loss" if step.loss is not None else "output"
    return f"the {what} is non-finite" + ("" if step.nonfinite_here else " on another rank")
