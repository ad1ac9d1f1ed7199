"""Recognises a directory, or one part of several, given in place of a file, and says what to pass instead.

Only names are read; no file is opened.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nandoctor.errors import DumpError
from nandoctor.text import brief

# One shard of several of Hugging Face; a rank's part of DCP, and of DeepSpeed's ZeRO.
_PART = re.compile(r"(-\d{5}-of-(?!00001)\d{5}\.(safetensors|bin|pt|pth)|\.distcp|_optim_states\.pt)$|zero_pp_rank_")
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


def refuse_part(path: Path) -> None:
    """Raise an error if the name marks a file as one part of several.

    Raises:
        DumpError: it does; the remedy says what to pass.
    """
    if _PART.search(path.name):
        raise part_error()


def part_error() -> DumpError:
    """Return the error for one part of a checkpoint, such as a rank's file, in which DeepSpeed's ZeRO leaves a part.

    https://www.deepspeed.ai/tutorials/zero/#extracting-weights
    """
    return DumpError("it holds only a part of a model's weights, and other files the rest.", remedy=_PASS_WHOLE)
