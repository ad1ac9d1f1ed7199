"""Checks healthy steps: `checkup` measures how near each layer comes to overflow and underflow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from nandoctor.autocast.policy import REFERENCE
from nandoctor.diagnosis.ranges import measure_layers
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.reader import add_batch, read_dump
from nandoctor.errors import DumpError, ModelError, NanDoctorError
from nandoctor.evidence.checkup import Checkup
from nandoctor.evidence.trace import describe_run
from nandoctor.replaying.model_loading import ModelSource
from nandoctor.replaying.progress import Listener, Progress, listener_of
from nandoctor.replaying.runner import FailingStep, Outcome, Watch
from nandoctor.replaying.settings import Settings, StepOptions, settings_for
from nandoctor.replaying.setup import prepare
from nandoctor.replaying.weights import take_weights

CheckpointFile = Dump | str | os.PathLike[str]


def checkup(
    checkpoint: CheckpointFile,
    model: ModelSource | None = None,
    *,
    batch: str | os.PathLike[str] | None = None,
    progress: Progress = lambda *_: None,
    **options: Unpack[StepOptions],
) -> Checkup:
    """Measure how near each layer of a healthy step comes to overflow and underflow in narrower formats.

    `model` and `progress` are those of `replay`.

    Args:
        checkpoint: a file of weights, a dump, or what `load` returns; with `batch` all that `weights` takes.
        batch: a file with the arrays to call the model with; by default those of the checkpoint.
        **options: the keywords of `replay` but `per_sample`, `fixes`, `max_trials` and `time`.

    Returns:
        `layers`, with the largest magnitude of each and the doublings left in fp16, bf16 and fp8.

    Raises:
        NanDoctorError: a file, the model, the call or an option is wrong, or the step is not healthy in fp32.
    """
    named, model = (model, None) if isinstance(model, str) else (None, model)
    dump, settings = _read(checkpoint, batch, {**options, "model": named})
    return _check(dump, model, settings, listener_of(progress))


def _read(file: CheckpointFile, batch: str | os.PathLike[str] | None, options: dict[str, Any]) -> tuple[Dump, Settings]:
    """Return the checkpoint's weights with the batch, and the settings."""
    if isinstance(file, Dump) or batch is None or not _holds_weights_alone(Path(file)):
        dump = file if isinstance(file, Dump) else read_dump(file)
        dump = dump if batch is None else add_batch(dump, batch)
        settings = settings_for(dump.path, options)
    else:
        dump = replace(read_dump(batch), path=Path(file))
        settings = settings_for(dump.path, options)
        settings = replace(settings, weights=settings.weights or str(dump.path.absolute()))
    return take_weights(dump, settings), settings


def _holds_weights_alone(path: Path) -> bool:
    return path.is_dir() or path.name.endswith((".safetensors", ".index.json"))


def _check(dump: Dump, model: ModelSource | None, settings: Settings, progress: Listener) -> Checkup:
    if not dump.arrays and settings.call is None:
        raise DumpError(
            f"{dump.path} holds weights and no batch.", remedy="Name a file that holds one: --batch batch.pth."
        )
    preparation = prepare(dump, model, settings, progress)
    steps = [replace(step, training=preparation.modes[0], seed=preparation.seeds[0]) for step in preparation.steps]
    step, wide = _run_first(steps)
    narrow = step.run(watch=Watch(stage="checkup", ops=True))
    if not wide.trace.finite:
        raise NanDoctorError(
            f"{dump.path}: this step is not healthy, its output is non-finite in fp32.",
            remedy=f"Find out why: nandoctor replay {dump.path}.",
        )
    return Checkup(
        path=str(dump.path),
        layers=measure_layers(wide.trace, narrow.trace),
        run=describe_run(narrow.trace.policy, narrow.trace.format),
        run_finite=narrow.trace.finite,
        notes=(f"Called as {step.description} in {'train' if step.training else 'eval'} mode.", *preparation.notes),
    )


def _run_first(steps: Sequence[FailingStep]) -> tuple[FailingStep, Outcome]:
    """Return the step in the first call that the model accepts, and its fp32 run."""
    first: ModelError | None = None
    for step in steps:
        try:
            return step, step.run(REFERENCE, Watch(stage="checkup", ops=True))
        except ModelError as error:
            first = first or error
    assert first is not None
    raise first
