"""Reads weights as a training saves them: in one file, or in the shards of a directory.

No code in a file is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from nandoctor.dumps.classify import check_weights
from nandoctor.dumps.file_type import damaged, directory_error, regular_size
from nandoctor.dumps.reader import named, read_state
from nandoctor.errors import DumpError
from nandoctor.text import brief

State = Mapping[str, torch.Tensor]

# The names that transformers and diffusers give the weights of a whole model, and its shards, the likeliest first.
_WHOLE = (
    *("model.safetensors", "model-*-of-*.safetensors"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin"),
)


def read_weights(path: str | os.PathLike[str]) -> State:
    """Read the weights at `path`, by their names there.

    `path` is a safetensors file, a directory of Hugging Face, or a file of torch.save: a state dict, a dump,
    DeepSpeed's model states.

    Raises:
        DumpError: it is none of these, a part of one, damaged or hostile.
    """
    location = Path(path)
    with named(location):
        try:
            state = _read_directory(location) if location.is_dir() else _read_file(location)
        except OSError as error:
            raise DumpError(f"it cannot be read ({error.strerror}).", remedy="Check the path.") from error
        if not state:
            raise DumpError("it has no weights.", remedy="Name a file of weights.")
    return state


def _read_file(path: Path) -> State:
    return _read_safetensors(path) if path.suffix == ".safetensors" else read_state(path)


def _read_directory(folder: Path) -> State:
    """Read the file or the shards of a whole model in a directory of Hugging Face."""
    files = next(filter(None, (sorted(folder.glob(name)) for name in _WHOLE)), [])
    if not files:
        raise directory_error(folder)
    _, is_shard, number = files[0].stem.rpartition("-of-")
    shards = [_read_file(file) for file in files]
    state = {name: tensor for shard in shards for name, tensor in shard.items()}
    if (is_shard and number != f"{len(files):05}") or len(state) < sum(map(len, shards)):
        raise DumpError(
            f"it has {len(files)} shards, not all of which are those of {brief(files[0].name)}.",
            remedy="Put all shards of one checkpoint, and no others, into the directory.",
        )
    return state


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
