"""Says what to pass instead of a directory, or of a file that has only a part of the weights."""

from __future__ import annotations

import shlex
from pathlib import Path

from nandoctor.errors import DumpError
from nandoctor.text import brief

_PASS_WHOLE = (
    "Pass the whole with --weights. Of Hugging Face: the directory. Of torch.distributed.checkpoint: the file of "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY weights.pt. Of DeepSpeed: what "
    "python zero_to_fp32.py DIRECTORY weights writes; without ZeRO its mp_rank_00_model_states.pt."
)


def directory_error(path: Path) -> DumpError:
    """Return the error for a directory in place of a file."""
    folder = shlex.quote(brief(str(path), 1000))
    remedy = f"Name a file, or replay all dumps in it: nandoctor triage {folder}. If it is a checkpoint: {_PASS_WHOLE}"
    return DumpError("it is a directory, not a file.", remedy=remedy)


def part_error() -> DumpError:
    """Return the error for one part of a checkpoint, such as a rank's file, in which DeepSpeed's ZeRO leaves a part.

    https://www.deepspeed.ai/tutorials/zero/#extracting-weights
    """
    return DumpError("it holds only a part of a model's weights, and other files the rest.", remedy=_PASS_WHOLE)
