"""What a directory is that was given in place of a dump, and the command for it.

In: the path of a directory. Out: a DumpError that names it; nothing in the directory is opened.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nandoctor.errors import DumpError
from nandoctor.text import brief

_MAX_LISTED = 10_000


def describe_directory(path: Path) -> DumpError:
    """The error for a directory, by the names of the files in it. Raises OSError."""
    names = {item.name for item in islice(path.iterdir(), _MAX_LISTED)}
    kind, remedy = next(_kinds(path, names), ("a directory, not a file", "Name the file that torch.save wrote."))
    return DumpError(f"it is {kind}.", remedy=remedy)


def _kinds(path: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """What it may be, the surest first, each with what to do."""
    folder = shlex.quote(brief(str(path), 1000))
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        yield (
            "a directory of torch.distributed.checkpoint (DCP)",
            "Make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{folder} weights.pt.",
        )
    if "zero_to_fp32.py" in names:
        yield (
            "a checkpoint directory of DeepSpeed",
            f"Join its parts with the script that DeepSpeed left in it: python {folder}/zero_to_fp32.py {folder} "
            "weights.pt.",
        )
    shards = sorted(name for name in names if name.endswith((".safetensors", ".bin")))
    if any(name.endswith((".safetensors.index.json", ".bin.index.json")) for name in names) or shards:
        yield (
            f"a checkpoint directory as Hugging Face writes it, of {len(shards)} files of weights",
            "Load the model from it with its own library, and save the step: torch.save({'state_dict': "
            "model.state_dict(), 'input_ids': input_ids}, path).",
        )
    if any(name.endswith((".pth", ".pt")) for name in names):
        yield "a directory of dumps or checkpoints", f"Look at all of them: nandoctor triage {folder}; or name one."
