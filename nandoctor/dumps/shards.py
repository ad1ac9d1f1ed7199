"""Joins weights that were sharded over ranks, from the files of all ranks of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nandoctor.dumps.recorded_format import get
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.dumps.tensors import to_torch
from nandoctor.errors import DumpError
from nandoctor.text import brief

_TAKE_ALL = "Put the files of all ranks of one step into one folder, as the recorder wrote them."
_MAX_RANKS = 1 << 16
_SAME_STEP = ("step", "micro_batch", "epoch", "world_size")

Load = Callable[[Path], Mapping[str, Any]]
Place = tuple[int, ...]
"""The indices of the first element of a part in the whole weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The shape of a whole weight, and the place of this rank's part in it."""

    shape: tuple[int, ...]
    offset: Place


def join_shards(saved: Mapping[str, Any], path: Path, load: Load) -> dict[str, torch.Tensor]:
    """Return every sharded weight joined; `load` reads the file of another rank, in the same folder.

    Raises:
        DumpError: a rank's file is missing or of another step, or the parts do not make up the weight.
    """
    shapes = {name: shard.shape for name, shard in _shards_of(saved).items()}
    parts: dict[str, dict[Place, Any]] = {name: {} for name in shapes}
    for contents, file in _files_of_ranks(saved, path, load):
        _add_parts(parts, contents, file)
    for name, shape in shapes.items():
        if sum(part.numel() for part in parts[name].values()) != math.prod(shape):
            raise DumpError(
                f"it holds only a part of the weights, and the files beside it have not all of {brief(name)}.",
                remedy=_TAKE_ALL,
            )
    return {name: _join(name, shape, parts[name]) for name, shape in shapes.items()}


def _shards_of(saved: Mapping[str, Any]) -> Mapping[str, Shard]:
    shards: Mapping[str, Shard] = get(saved, "shards", Mapping[str, Shard], {})
    return shards


def _files_of_ranks(saved: Mapping[str, Any], path: Path, load: Load) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Yield what the ranks recorded of the step, with its file: first what was read already, then the others."""
    yield saved, path
    event = get(saved, "event", Mapping[str, Any], {})
    own = get(event, "rank", int, 0)
    for rank in range(min(get(event, "world_size", int, 1), _MAX_RANKS)):
        file = path.with_name(path.name.replace(f"-rank{own}", f"-rank{rank}"))
        if file == path or not file.is_file():
            continue
        contents = load(file)
        other = get(contents, "event", Mapping[str, Any], {})
        if any(other.get(name) != event.get(name) for name in _SAME_STEP):
            raise DumpError(f"{brief(file.name)} beside it is of another step.", remedy=_TAKE_ALL)
        yield contents, file


def _add_parts(parts: Mapping[str, dict[Place, Any]], contents: Mapping[str, Any], file: Path) -> None:
    """Add a file's parts to those of the same weight; joining copies them, so they may claim what the file has."""
    state, nbytes_left = get(contents, "state_dict", Mapping[str, Any], {}), file.stat().st_size
    for name, shard in _shards_of(contents).items():
        part = state.get(name)
        if name not in parts or not is_dense(part) or not part.numel():
            continue
        nbytes_left -= part.nbytes
        if nbytes_left < 0:
            raise DumpError(f"{brief(file.name)} claims more weights than it holds.", remedy=_TAKE_ALL)
        parts[name].setdefault(shard.offset, part)


def _join(name: str, shape: tuple[int, ...], parts: Mapping[Place, Any]) -> torch.Tensor:
    tensors = {offset: to_torch(part) for offset, part in parts.items()}
    try:
        whole = torch.zeros(shape, dtype=next(iter(tensors.values())).dtype if tensors else None)
        for offset, tensor in tensors.items():
            ends = [begin + size for begin, size in zip(offset, tensor.shape, strict=True)]
            whole[tuple(map(slice, offset, ends))] = tensor
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise DumpError(
            f"the ranks' parts of {brief(name)} cannot be joined ({type(error).__name__}).", remedy=_TAKE_ALL
        ) from error
    return whole
