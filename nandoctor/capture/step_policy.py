"""Decide what to do about each finished step: nothing, write a dump, or stop the training."""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nandoctor.capture.environment import is_typed, read_rank
from nandoctor.capture.step import RAISED, RecordedStep
from nandoctor.dumps.recorded_format import Recorded, Reference, approving_command
from nandoctor.dumps.writer import remove_orphans, write_dump
from nandoctor.errors import NonFiniteTrainingError
from nandoctor.text import join_first, number

if TYPE_CHECKING:
    from nandoctor.capture.recorder import Recorder

LOG = logging.getLogger("nandoctor")


class StepPolicy:
    """A policy that counts finished steps, saves the first failed step of each episode, and stops the training.

    An episode begins with a step worth saving, unless the step before it or another micro-batch of the same update is
    one. The training is to stop if more than a share `threshold` of the last `window` steps failed; the share is of the
    full window, even while fewer steps were seen.

    `on_save` gets each file's path and `event` entry. `written` has the last `keep` files and why each was saved,
    oldest first; others are left alone. Files of skipped steps make way first: one may follow any growth of the scale,
    and be harmless. Once there are `keep` files, an episode is saved only if the last file is `window` steps old: a
    training that fails at every other step must not spend its time on writing.
    """

    def __init__(
        self, *, settings: Recorder, make_contents: Callable[[RecordedStep, str, str], Mapping[str, Any]]
    ) -> None:
        self.settings, self.make_contents = settings, make_contents
        self.written: dict[Path, str] = {}
        self._failed: deque[bool] = deque(maxlen=settings.window)
        self._num_steps = self._last_saved = 0
        self._in_episode, self._last_worth_saving, self._last_fit = False, -1, -math.inf
        with suppress(OSError):
            remove_orphans(Path(settings.folder))  # left by an earlier run that was killed

    def decide(self, step: RecordedStep, *, may_stop: bool) -> None:
        """Count the step, and save it if it begins an episode or ends the training.

        Raises NonFiniteTrainingError if the rule says to stop, and `may_stop` is set.
        """
        step.decided = True
        reason, scale = step.reason, step.loss_scale
        failed = bool(reason) and (reason != "skipped" or _is_below_1(scale))
        # One success shows that the gradients fit at this scale: after it, a skip is no part of the search for a scale.
        worth_saving = failed or (scale is not None and step.was_skipped and scale <= self._last_fit)
        if scale is not None and step.updates and not step.was_skipped:
            self._last_fit = scale
        self._num_steps += 1
        self._failed.append(failed)
        begins = not self._in_episode and self._last_worth_saving != step.step
        self._in_episode = worth_saving
        if not worth_saving:
            return
        self._last_worth_saving = step.step
        num_failed, waited = sum(self._failed), self._num_steps - self._last_saved
        settings = self.settings
        stops = failed and num_failed > settings.threshold * settings.window
        if not stops and not (begins and (len(self.written) < settings.keep or waited >= settings.window)):
            return
        _, saved = self._save(step, reason, "stopped" if stops else "first")
        what = _describe(step, reason)
        if stops and may_stop:
            why = f"{num_failed} of the last {len(self._failed)} steps failed"
            message = f"The recorder stopped the training at step {step.step}: {what}; {why}."
            raise NonFiniteTrainingError(message, remedy=saved)
        LOG.warning("Step %d: %s. %s", step.step, what, saved)

    def save(self, step: RecordedStep, reason: str) -> Path | None:
        """Save the step at the loop's request; return the file, None if it could not be written."""
        path, saved = self._save(step, "loss" if step.loss_nonfinite else reason, "requested")
        LOG.warning("Step %d: saved on request (%s). %s", step.step, reason, saved)
        return path

    def _save(self, step: RecordedStep, reason: str, event: str) -> tuple[Path | None, str]:
        """Write the step; return the file, or None, and a sentence that says what to do next.

        Errors are logged and not raised: the recorder must not end a training.
        """
        if step.before is None:
            return None, "The model was not called in this step, so there is nothing to save."
        self._last_saved = self._num_steps
        settings, (rank, world_size) = self.settings, read_rank()
        kind = "nan" if reason in ("loss", "gradients", "update", "skipped") else "step"
        stem = f"{kind}-step{step.step:06d}" + (f"-micro{step.micro_batch}" if step.micro_batch else "")
        stem += f"-rank{rank}" if world_size > 1 else ""
        try:
            contents = self.make_contents(step, reason, event)
            path = write_dump(contents, Path(settings.folder), stem)
        except Exception as error:
            LOG.warning(
                "nandoctor could not save %s in %s (%s: %s).", stem, settings.folder, type(error).__name__, error
            )
            return None, "It could not be saved; the log says why."
        while len(self.written) >= settings.keep:
            skipped = (old for old, why in self.written.items() if why == "skipped")
            oldest = next(skipped, next(iter(self.written)))
            del self.written[oldest]
            with suppress(OSError):
                oldest.unlink(missing_ok=True)
        self.written[path] = reason
        if settings.on_save is not None:
            try:
                settings.on_save(path, contents["event"])
            except Exception as error:
                LOG.warning("on_save failed for %s (%s: %s).", path, type(error).__name__, error)
        return path, say_next(path, contents)


def say_next(path: Path, written: Mapping[str, Any]) -> str:
    """Return what was saved and the command that replays it, or the call in this notebook if it defines the model."""
    if is_typed(written["model"]):
        return f"Saved to {path}; next, here: nandoctor.replay({str(path)!r})"
    start = os.environ.get("PWD")  # the folder of the shell that started this process, which may have left it since
    if start is not None and Path(start).resolve() != Path.cwd():
        path = path.absolute()
    command = f"next: nandoctor replay {shlex.quote(str(path))}"
    model, loss = (Reference(**written[name]) if written.get(name) else None for name in ("model", "loss_function"))
    if model and model.file and model.source is None:  # a replay imports only from the folder that it runs in
        command = f"next: {approving_command(path, Recorded(model=model, loss_function=loss), own=True)}"
    if "checkpoint" not in written:
        return f"Saved to {path}; {command}"
    command += " --weights CHECKPOINT"
    return f"Saved to {path}, without the weights, which would exceed max_nbytes; {command}"


def _is_below_1(scale: float | None) -> bool:
    """Return True for a loss scale that GradScaler's search does not explain.

    A gradient that overflows at a loss scale below 1 overflows without scaling too. Above it, halving the scale helps,
    and GradScaler does so to find a scale: in its warm-up, and at a scale that it has just grown to.
    """
    return scale is not None and scale < 1


def _describe(step: RecordedStep, reason: str) -> str:
    what = "loss" if step.loss is not None else "output"
    if reason == "loss":
        if RAISED in step.flags:
            place = "forward" if len(step.returned) < len(step.calls) else "step"
            what = f"{place} raised an error, and a value in it"
        ranks = step.nonfinite_ranks
        of = f"rank{'s' * (len(ranks) > 1)} {join_first(list(map(str, ranks)), 3)}"
        elsewhere = "" if step.nonfinite_here else f" on {of}, whose file is the one to replay"
        return f"the {what} is non-finite{elsewhere}"
    if reason == "gradients":
        return f"the {what} is finite, but its gradients are not"
    if reason == "update":
        assert step.spoiled is not None
        writer = type(step.spoiled.optimizer).__name__
        finite = "the loss is" if step.spoiled.gradients is None else "loss and gradients are"
        return f"{finite} finite, but the update by {writer} left non-finite weights"
    known = "" if _is_below_1(step.loss_scale) else ", at which earlier steps succeeded"
    scale = number(step.loss_scale)
    return f"the gradients are non-finite at a loss scale of {scale}{known}, and the scaler skipped the step"
