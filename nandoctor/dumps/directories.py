"""What a path is that was given in place of a dump: a directory, or one part of several; and what to pass instead.

Told by the names in it; nothing is opened.
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
    "deepspeed": "a checkpoint directory of DeepSpeed",
    "hugging face": "a checkpoint directory as Hugging Face writes it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A directory's kind, and the names of the files in it, sorted."""

    kind: Kind
    names: tuple[str, ...]

    def ending(self, *endings: str) -> list[str]:
        """The names that end so."""
        return [name for name in self.names if name.endswith(endings)]


def list_directory(path: Path) -> Listing:
    """Tell by the names in a directory what wrote it. Raises OSError."""
    names = tuple(sorted(item.name for item in islice(path.iterdir(), _MAX_LISTED)))
    return Listing(kind=_kind_of(names), names=names)


def _kind_of(names: tuple[str, ...]) -> Kind:
    if ".metadata" in names:
        return "dcp"
    if _JOIN in names or any(name.endswith("_model_states.pt") for name in names):
        return "deepspeed"
    if any(name.endswith((*_INDEX, ".safetensors", ".bin")) for name in names):
        return "hugging face"
    if "latest" in names:  # DeepSpeed's note of the last step's folder; without ZeRO it leaves no script
        return "deepspeed"
    return "dumps" if any(name.endswith((".pth", ".pt")) for name in names) else "unknown"


def describe_directory(path: Path) -> DumpError:
    """The error for a directory in place of a dump. Raises OSError."""
    kind, folder = list_directory(path).kind, _quote(path)
    if kind in _WEIGHTS:
        return DumpError(
            f"it is {_WEIGHTS[kind]}: weights, and no batch.",
            remedy=f"Give it beside the file that has the batch: nandoctor replay DUMP --weights {folder}.",
        )
    if kind == "dumps":
        return DumpError(
            "it is a directory of dumps or checkpoints.",
            remedy=f"Name one of its files, or replay all of them: nandoctor triage {folder}",
        )
    return DumpError("it is a directory, not a file.", remedy="Name the file that torch.save wrote.")


def refuse_part(path: Path) -> None:
    """Refuse a file that by its name is one part of several.

    Raises:
        DumpError: it is; the remedy says what to pass.
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
            remedy=f"Give the directory: --weights {folder}.",
        )
    if path.name.endswith("_optim_states.pt") or ("zero_pp_rank_" in path.name and path.name.endswith(".pt")):
        raise stub_error(path.parent)


def stub_error(folder: Path | None) -> DumpError:
    """The error for what DeepSpeed's ZeRO leaves of the weights in the file of one rank, in this folder.

    The script lies there, or in the folder above that of the step, and takes the folder that it lies in:
    https://www.deepspeed.ai/tutorials/zero/#extracting-weights
    """
    homes = []
    if folder is not None:
        above, step = folder.absolute().parent, folder.absolute().name
        homes = [(folder, ""), (above, f" -t {_quote(Path(step))}")]
    found = [(_quote(home / _JOIN), _quote(home), tag) for home, tag in homes if (home / _JOIN).is_file()]
    script, home, tag = next(iter(found), (f"DIRECTORY/{_JOIN}", "DIRECTORY", ""))
    return DumpError(
        "it holds one rank's part of what DeepSpeed's ZeRO has split, and not the weights.",
        remedy="Join the parts with the script that DeepSpeed left in the checkpoint's directory, and pass what it "
        f"writes: python {script} {home} weights{tag}; then --weights weights.",
    )


def _quote(path: Path) -> str:
    return shlex.quote(brief(str(path), 1000))
