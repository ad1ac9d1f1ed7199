"""nandoctor: the post-mortem for mixed-precision training.

Importing this package does not import torch; the names below do, when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nandoctor.autocast.policy import cuda_autocast as cuda_autocast
    from nandoctor.capture.recorder import Recorder as Recorder
    from nandoctor.case import Case as Case
    from nandoctor.case import load as load
    from nandoctor.case import replay as replay
    from nandoctor.case import repro as repro
    from nandoctor.case import verify as verify
    from nandoctor.errors import NanDoctorError as NanDoctorError
    from nandoctor.errors import NonFiniteTrainingError as NonFiniteTrainingError
    from nandoctor.fleet.triage import TriageOptions as TriageOptions
    from nandoctor.fleet.triage import triage as triage

__version__ = "0.1.0"

_NAMES = {
    "nandoctor.autocast.policy": "cuda_autocast",
    "nandoctor.capture.recorder": "Recorder",
    "nandoctor.case": "Case load replay repro verify",
    "nandoctor.errors": "NanDoctorError NonFiniteTrainingError",
    "nandoctor.fleet.triage": "TriageOptions triage",
}
_HOMES = dict(sorted((name, module) for module, names in _NAMES.items() for name in names.split()))

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nandoctor' has no attribute {name!r}")
    if (home := _HOMES[name]) not in sys.modules:
        import random  # noqa: PLC0415 - `--help` does not need it

        state = random.getstate()
        importlib.import_module(home)
        random.setstate(state)  # rich draws from it when it is imported
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return ["__version__", *__all__]
