"""Reads weights as a training saves them: in one file, or in an index with its shards.

No code in a file is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from nandoctor.dumps.classify import check_weights
from nandoctor.dumps.file_type import damaged, directory_error, regular_size
from nandoctor.dumps.reader import named, read_state
from nandoctor.errors import DumpError
from nandoctor.text import brief, brief_list

State = Mapping[str, torch.Tensor]

_INDEX = (".safetensors.index.json", ".bin.index.json")
_MAX_INDEX_NBYTES = 64 << 20
# The names that transformers and diffusers give the weights of a whole model, the likeliest first.
_WHOLE = (
    *("model.safetensors.index.json", "model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("diffusion_pytorch_model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
)


def read_weights(path: str | os.PathLike[str]) -> State:
    """Read the weights at `path`, by their names there.

    `path` is a safetensors file, an index of Hugging Face (`.index.json`) or its directory, or a file of torch.save: a
    state dict, a dump, DeepSpeed's model states.

    Raises:
        DumpError: it is none of these, a part of one, damaged or hostile.
    """
    location = Path(path)
    with named(location):
        try:
            state = _read_file(_choose_file(location) if location.is_dir() else location)
        except OSError as error:
            raise DumpError(f"it cannot be read ({error.strerror}).", remedy="Check the path.") from error
        if not state:
            raise DumpError("it has no weights.", remedy="Name a file of weights.")
    return state


def _read_file(path: Path) -> State:
    if path.name.endswith(_INDEX):
        return _read_index(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else read_state(path)


def _choose_file(folder: Path) -> Path:
    """Return the file of a whole model in a directory of Hugging Face."""
    for name in _WHOLE:
        if (folder / name).exists():
            return folder / name
    raise directory_error(folder)


def _read_index(path: Path) -> State:
    """Read all shards that an index of Hugging Face names, each tensor from the file that the index says."""
    state: dict[str, torch.Tensor] = {}
    shards: dict[tuple[int, int], State] = {}  # by the file itself, since a thousand names may link to it
    for file, names in sorted(_read_places(path).items()):
        shard_path = path.parent / file
        if not shard_path.is_file():
            raise DumpError(
                f"{brief(file)}, one of the shards that it names, is not beside it.",
                remedy="Put all shards into the folder of the index.",
            )
        status = shard_path.stat()
        place = status.st_dev, status.st_ino
        shard = shards[place] = shards.get(place) or _read_file(shard_path)
        missing = [name for name in names if name not in shard]
        if missing:
            raise DumpError(
                f"{brief(file)} does not hold {brief_list(missing)}, as the index says.",
                remedy="Use the index and the shards of the same checkpoint.",
            )
        state |= {name: shard[name] for name in names}
    return state


def _read_places(index: Path) -> Mapping[str, list[str]]:
    """Return the names of the tensors in each file, by the index."""
    if regular_size(index) > _MAX_INDEX_NBYTES:
        raise damaged("its index is larger than that of any model")
    names: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith((".safetensors", ".bin")):
                raise ValueError(file)
            names.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("it has no weight_map of names and files") from error
    return names


def _read_safetensors(path: Path) -> State:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise DumpError(
            "reading it needs the package safetensors.", remedy="Install it: pip install nandoctor[safetensors]."
        ) from error
    nbytes = regular_size(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise damaged(f"safetensors cannot read it ({brief(str(error))})") from error
    return check_weights(state, nbytes)
