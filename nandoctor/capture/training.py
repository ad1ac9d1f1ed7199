"""Describe what all steps of a training have in common, when its recorder is made."""

from __future__ import annotations

import functools
import logging
from typing import Any

from nandoctor.capture.dump_contents import Training
from nandoctor.capture.model_rebuild import describe_arguments, find_config, plan_rebuild
from nandoctor.capture.observer import Observer
from nandoctor.capture.recorder_settings import RecorderSettings
from nandoctor.capture.source_info import (
    ProjectSources,
    advise_loss,
    class_of,
    describe_loss,
    describe_source,
    flags_for_loss,
)

LOG = logging.getLogger("nandoctor")


def describe_training(settings: RecorderSettings, observer: Observer, scaler: Any) -> tuple[Training, str | None]:
    """Return what all files have in common, and the flags that a replay needs; log how to do without them.

    The flags are None if only this notebook can replay the files.
    """
    model, builder, arguments = observer.model, settings.builder, settings.arguments or {}
    if isinstance(builder, functools.partial) and not builder.args:
        arguments = {**builder.keywords, **arguments}
        builder = builder.func
    source = describe_source(builder or class_of(model))
    built = builder is not None and not isinstance(builder, type)
    loss = None if settings.loss is None else describe_loss(settings.loss)
    described = describe_arguments(arguments) if arguments or built else find_config(model)
    flags, advice = plan_rebuild(model, source, described, built=built)
    flags = None if flags is None else flags + flags_for_loss(loss)
    for line in (*advice, *advise_loss(settings.loss, loss)):
        LOG.warning("nandoctor.Recorder: %s", line)
    return Training(
        observer=observer,
        model=source,
        loss=loss,
        arguments=described,
        built=built,
        method=settings.method,
        files=ProjectSources(model, source, loss),
        scaler=scaler,
        keep_optimizer=settings.keep_optimizer,
    ), flags
