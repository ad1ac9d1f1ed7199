"""Recognises a directory, or one part of several, given in place of a dump, and says what to pass instead.

Only names are read; no file is opened.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from nandoctor.errors import DumpError
from nandoctor.text import brief

Kind = Literal["dcp", "deepspeed", "hugging face", "dumps", "unknown"]

_MAX_LISTED = 10_000
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)$")
_JOIN = "zero_to_fp32.py"
_INDEX = (".safetensors.index.json", ".bin.index.json")
_WEIGHTS: dict[Kind, str] = {
    "dcp": "a directory of torch.distributed.checkpoint (DCP)",
    "deepspeed": "a DeepSpeed checkpoint directory",
    "hugging face": "a Hugging Face checkpoint directory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A directory's kind, and the names of the files in it, sorted."""

    kind: Kind
    names: tuple[str, ...]

    def ending(self, *endings: str) -> list[str]:
        """Return the names with one of these endings."""
        return [name for name in self.names if name.endswith(endings)]


def list_directory(path: Path) -> Listing:
    """List a directory, and tell by the names in it what wrote it. Raises OSError."""
    names = tuple(sorted(item.name for item in islice(path.iterdir(), _MAX_LISTED)))
    return Listing(kind=_kind_of(names), names=names)


def _kind_of(names: tuple[str, ...]) -> Kind:
    if ".metadata" in names:
        return "dcp"
    if _JOIN in names or any(name.endswith("_model_states.pt") for name in names):
        return "deepspeed"
    if any(name.endswith((*_INDEX, ".safetensors", ".bin")) for name in names):
        return "hugging face"
    if "latest" in names:  # DeepSpeed's file with the name of the last step's folder; without ZeRO there is no script
        return "deepspeed"
    return "dumps" if any(name.endswith((".pth", ".pt")) for name in names) else "unknown"


def describe_directory(path: Path) -> DumpError:
    """Return the error for a directory in place of a dump. Raises OSError."""
    kind, folder = list_directory(path).kind, _quote(path)
    if kind in _WEIGHTS:
        return DumpError(
            f"it is {_WEIGHTS[kind]}: weights without a batch.",
            remedy=f"Pass it with the file that has the batch: nandoctor replay DUMP --weights {folder}.",
        )
    if kind == "dumps":
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
    shard, folder = _SHARD.search(path.name), _quote(path.parent)
    if shard is not None and int(shard[2]) > 1:
        raise DumpError(
            f"it is one of {int(shard[2])} shards of a model's weights.",
            remedy=f"Give the directory of all shards and their index: --weights {folder}.",
        )
    if path.name.endswith(".distcp"):
        raise DumpError(
            "it is one rank's part of a checkpoint of torch.distributed.checkpoint (DCP).",
            remedy=f"Give the directory: --weights {folder} --trust.",
        )
    if path.name.endswith("_optim_states.pt") or ("zero_pp_rank_" in path.name and path.name.endswith(".pt")):
        raise stub_error(path.parent)


def stub_error(folder: Path | None) -> DumpError:
    """Return the error for one rank's file in this folder, in which DeepSpeed's ZeRO leaves only a part of the weights.

    The script that joins the parts lies in this folder or its parent, and takes the folder that it lies in:
    https://www.deepspeed.ai/tutorials/zero/#extracting-weights
    """
    homes = []
    if folder is not None:
        above, step = folder.absolute().parent, folder.absolute().name
        homes = [(folder, ""), (above, f" -t {_quote(Path(step))}")]
    found = [(_quote(home / _JOIN), _quote(home), tag) for home, tag in homes if (home / _JOIN).is_file()]
    script, home, tag = next(iter(found), (f"DIRECTORY/{_JOIN}", "DIRECTORY", ""))
    return DumpError(
        "it holds only one rank's part of weights that DeepSpeed's ZeRO has split.",
        remedy="Join the parts with the script that DeepSpeed left in the checkpoint's directory, and pass what it "
        f"writes: python {script} {home} weights{tag}; then --weights weights.",
    )


def _quote(path: Path) -> str:
    return shlex.quote(brief(str(path), 1000))
