"""Recognises a directory, or one part of several, given in place of a file, and says what to pass instead.

Only names are read; no file is opened.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from nandoctor.errors import DumpError
from nandoctor.text import brief

INDEX = (".safetensors.index.json", ".bin.index.json")
"""The endings of an index of Hugging Face, which says which file has which weight."""
_MAX_LISTED = 10_000
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)$")
_MAKE_FILE = (
    "Make one file of the directory: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY "
    "weights.pt; then pass --weights weights.pt."
)
_JOIN_ZERO = (
    "Join the parts with the script that DeepSpeed left in the checkpoint's directory: python zero_to_fp32.py "
    "DIRECTORY weights; then pass --weights weights. Without ZeRO, pass its mp_rank_00_model_states.pt."
)


def list_directory(path: Path) -> list[str]:
    """Return the names in a directory, sorted. Raises OSError."""
    return sorted(item.name for item in islice(path.iterdir(), _MAX_LISTED))


def holds_pretrained(names: Sequence[str]) -> bool:
    """Return True for the names in a directory that Hugging Face's libraries wrote."""
    return any(name.endswith((*INDEX, ".safetensors", ".bin")) for name in names)


def describe_directory(path: Path) -> DumpError:
    """Return the error for a directory in place of a file. Raises OSError."""
    names, folder = list_directory(path), _quote(path)
    if ".metadata" in names:
        return DumpError("it is a directory of torch.distributed.checkpoint (DCP).", remedy=_MAKE_FILE)
    if "zero_to_fp32.py" in names or "latest" in names or any(name.endswith("_model_states.pt") for name in names):
        return DumpError("it is a DeepSpeed checkpoint directory.", remedy=_JOIN_ZERO)
    if holds_pretrained(names):
        return DumpError(
            "it is a Hugging Face checkpoint directory: weights without a batch.",
            remedy=f"Pass it with the file that has the batch: nandoctor replay DUMP --weights {folder}.",
        )
    if any(name.endswith((".pth", ".pt")) for name in names):
        return DumpError(
            "it is a directory of dumps or checkpoints.",
            remedy=f"Name one of its files, or replay all of them: nandoctor triage {folder}",
        )
    return DumpError("it is a directory, not a file.", remedy="Name the file that torch.save wrote.")


def refuse_part(path: Path) -> None:
    """Raise an error if the name marks a file as one part of several.

    Raises:
        DumpError: it does; the remedy says what to pass.
    """
    shard = _SHARD.search(path.name)
    if shard is not None and int(shard[2]) > 1:
        raise DumpError(
            f"it is one of {int(shard[2])} shards of a model's weights.",
            remedy=f"Give the directory of all shards and their index: --weights {_quote(path.parent)}.",
        )
    if path.name.endswith(".distcp"):
        raise DumpError(
            "it is one rank's part of a checkpoint of torch.distributed.checkpoint (DCP).", remedy=_MAKE_FILE
        )
    if path.name.endswith("_optim_states.pt") or ("zero_pp_rank_" in path.name and path.name.endswith(".pt")):
        raise stub_error()


def stub_error() -> DumpError:
    """Return the error for one rank's file, in which DeepSpeed's ZeRO leaves only a part of the weights.

    https://www.deepspeed.ai/tutorials/zero/#extracting-weights
    """
    return DumpError("it holds only one rank's part of weights that DeepSpeed's ZeRO has split.", remedy=_JOIN_ZERO)


def _quote(path: Path) -> str:
    return shlex.quote(brief(str(path), 1000))
