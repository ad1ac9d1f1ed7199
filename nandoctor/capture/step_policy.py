"""Judges steps one after another: counts them, has the bad ones written, and says when it is enough.

In: moments whose flags have arrived. Out: files, lines in the log, `NonFiniteTrainingError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nandoctor.capture.archive import Archive
from nandoctor.capture.environment import read_rank
from nandoctor.capture.history import History, StepResult
from nandoctor.capture.source_info import write_command
from nandoctor.capture.step import Moment
from nandoctor.errors import NonFiniteTrainingError

LOG = logging.getLogger("nandoctor")

MakeContents = Callable[[Moment, StepResult, str], Mapping[str, Any]]


class Judge:
    """What a run has come to so far."""

    def __init__(self, history: History, archive: Archive, make_contents: MakeContents) -> None:
        self.history = history
        self.archive = archive
        self._make_contents = make_contents

    def judge(self, moment: Moment, *, may_stop: bool) -> None:
        """Count the moment, write it if it is the first bad one of an episode or the last straw.

        Raises:
            NonFiniteTrainingError: it is the last straw, and `may_stop` is set.
        """
        moment.judged = True
        result = _sum_up(moment)
        self.history.add(result)
        if not result.bad:
            return
        why = self.history.why_stop()
        if not why and not self.history.begins_episode:
            return
        saved = self._save(moment, result, "stopped" if why else "first")
        if why and may_stop:
            message = f"The recorder stopped the training at step {moment.step}: {why}."
            raise NonFiniteTrainingError(message, remedy=saved)
        LOG.warning("Step %d: %s. %s", moment.step, _describe(result, moment), saved)

    def _save(self, moment: Moment, result: StepResult, event: str) -> str:
        """Write the moment; what became of it, in a sentence that says what to do next."""
        if moment.before is None:
            return "The model was not called in this step, so there is nothing to save."
        rank, world_size = read_rank()
        stem = f"nan-step{moment.step:06d}" + (f"-rank{rank}" if world_size > 1 else "")
        contents: Mapping[str, Any] = {}

        def make() -> Mapping[str, Any]:
            nonlocal contents
            contents = self._make_contents(moment, result, event)
            return contents

        path = self.archive.write(make, stem)
        if path is None:
            return "It could not be saved; the log says why."
        return f"Saved to {path}; next: {write_command(path, contents['model'])}"


def _sum_up(moment: Moment) -> StepResult:
    skipped = moment.was_skipped
    # The scale is read from the device only where it matters.
    scale = float(moment.scale) if skipped and moment.scale is not None else None
    return StepResult(step=moment.step, loss_bad=moment.loss_bad, skipped=skipped, loss_scale=scale)


def _describe(result: StepResult, moment: Moment) -> str:
    if result.reason == "skipped":
        return f"the gradients are non-finite at a loss scale of {result.loss_scale:g}, and the scaler skipped the step"
    what = "loss" if moment.loss is not None else "output"
    return f"the {what} is non-finite" + ("" if moment.bad_here else " on another rank")
