"""The settings of a `Recorder`, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from nandoctor.capture.step_policy import OnSave
from nandoctor.capture.updates import UNDO_NBYTES
from nandoctor.errors import NanDoctorError


@dataclass(frozen=True, eq=False, repr=False)
class RecorderSettings:
    """The settings of a recorder; `Recorder` documents each."""

    model: nn.Module
    _: KW_ONLY
    folder: str | os.PathLike[str] = "dumps"
    scaler: Any = None
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None
    builder: Callable[..., nn.Module] | str | None = None
    arguments: Mapping[str, Any] | None = None
    threshold: float = 0.1
    window: int = 100
    in_a_row: int | None = None
    keep: int = 5
    max_nbytes: int = 8 << 30
    keep_optimizer: bool = False
    on_save: OnSave | None = None
    undo_nbytes: int = UNDO_NBYTES
    method: str = ""
    ambient: Callable[[], AbstractContextManager[Any]] = nullcontext
    from_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, Mapping | None):
            raise NanDoctorError(
                f"Recorder does not accept a {type(self.arguments).__name__} as arguments.",
                remedy='Give them by name: arguments={"width": 64}.',
            )
        counts = (self.window, self.keep, 1 if self.in_a_row is None else self.in_a_row)
        if not 0 <= self.threshold <= 1 or min(counts) < 1:
            raise NanDoctorError(
                f"Recorder does not accept threshold={self.threshold}, window={self.window}, in_a_row={self.in_a_row} "
                f"and keep={self.keep}.",
                remedy="threshold is a share from 0 to 1 (1 never stops); window, in_a_row and keep are 1 or more.",
            )


RecorderSettings.__init__.__qualname__ = "Recorder"  # the name in a TypeError about its arguments
