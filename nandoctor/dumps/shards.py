"""Joins weights that were sharded over ranks, from the files of all ranks of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def join_shards(saved: Mapping[str, Any], path: Path, load: Load) -> Mapping[str, Any]:
    """Return the contents with every sharded weight joined; `load` reads the file of another rank, in the same folder.

    Raises:
        DumpError: a rank's file is missing or of another step, or the parts do not make up the weight.
    """
    shards = get(saved, "shards", Mapping[str, Any], {})
    if not shards:
        return saved
    for name in shards:
        _check_mesh(str(name), shards[name])
    ranks = _Ranks(path, saved, load)
    joined = {str(name): _join(str(name), shards[name], ranks) for name in shards}
    return {**saved, "state_dict": {**get(saved, "state_dict", Mapping[str, Any], {}), **joined}}


class _Ranks:
    """The weights of one step by rank; the file of another rank is read when a part of it is needed.

    Joining copies parts, so what is taken from a file is bounded by its size, whatever sizes it claims.
    """

    def __init__(self, path: Path, saved: Mapping[str, Any], load: Load) -> None:
        self._path, self._load = path, load
        self._event = get(saved, "event", Mapping[str, Any], {})
        self.own = get(self._event, "rank", int, 0)
        self._states: dict[int, dict[Any, Any]] = {}
        self._nbytes_left: dict[int, int] = {}
        self._add(self.own, path, saved)

    def part(self, rank: int, name: str) -> torch.Tensor:
        """Return the part of the weight that this rank holds."""
        path = self._path.with_name(self._path.name.replace(f"-rank{self.own}", f"-rank{rank}"))
        if rank not in self._states:
            self._add(rank, path, self._read(rank, path))
        part = self._states[rank].get(name)
        if not is_dense(part):
            raise DumpError(f"{brief(path.name)} does not hold a part of {brief(name)}.", remedy=_TAKE_ALL)
        self._nbytes_left[rank] -= part.nbytes
        if self._nbytes_left[rank] < 0:
            raise DumpError(f"{brief(path.name)} claims more weights than it holds.", remedy=_TAKE_ALL)
        return to_torch(part)

    def _add(self, rank: int, path: Path, saved: Mapping[str, Any]) -> None:
        self._states[rank], self._nbytes_left[rank] = (
            get(saved, "state_dict", Mapping[str, Any], {}),
            path.stat().st_size,
        )

    def _read(self, rank: int, path: Path) -> Mapping[str, Any]:
        if path == self._path or not path.is_file():
            raise DumpError(
                f"it holds only rank {self.own}'s part of the weights, and the file of rank {rank} is not beside it.",
                remedy=f"Put the files of all ranks of this step into one folder: {brief(path.name)} is missing.",
            )
        saved = self._load(path)
        event = get(saved, "event", Mapping[str, Any], {})
        if any(event.get(name) != self._event.get(name) for name in _SAME_STEP):
            raise DumpError(f"{brief(path.name)} beside it is of another step.", remedy=_TAKE_ALL)
        return saved


def _check_mesh(name: str, shard: Any) -> None:
    """Refuse a mesh that is not nested lists of ranks: iterating over any other object may never end."""
    waiting, num_seen = [shard.get("ranks") if type(shard) is dict else None], 0
    while waiting:
        item = waiting.pop()
        num_seen += 1
        if num_seen > _MAX_RANKS or not (type(item) is list or (type(item) is int and 0 <= item < _MAX_RANKS)):
            raise _unfit(name, "its ranks are not nested lists of numbers")
        waiting += item if type(item) is list else []


def _join(name: str, shard: Any, ranks: _Ranks) -> torch.Tensor:
    try:
        whole = _join_along(shard["ranks"], list(shard["placements"]), name, ranks)
        fits = list(whole.shape) == list(shard["shape"])
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, RecursionError) as error:
        raise _unfit(name, type(error).__name__) from error
    if not fits:
        raise _unfit(name, f"they give {tuple(whole.shape)}")
    return whole


def _join_along(mesh: Any, placements: list[Any], name: str, ranks: _Ranks) -> torch.Tensor:
    """Return the part of the tensor that the ranks of this (sub)mesh hold; a mesh without dimensions is one rank."""
    if not placements:
        return ranks.part(int(mesh), name)
    placement, further = placements[0], placements[1:]
    if placement is None:
        part = next((part for part in mesh if _holds(part, ranks.own)), mesh[0])
        return _join_along(part, further, name, ranks)
    parts = [_join_along(part, further, name, ranks) for part in mesh]
    if type(placement) is list and [type(item) for item in placement] == [int, int]:
        return _join_chunks(parts, *placement)
    if type(placement) is not int:
        raise _unfit(name, f"a {type(placement).__name__} is not a plain split")
    return torch.cat(parts, dim=placement)


def _join_chunks(parts: list[torch.Tensor], dim: int, num_chunks: int) -> torch.Tensor:
    """Return the tensor that was first cut into `num_chunks` chunks, each then split over the parts."""
    size = sum(part.shape[dim] for part in parts)
    if not 0 < num_chunks <= _MAX_RANKS:
        raise ValueError(num_chunks)
    split = [_chunk_sizes(chunk, len(parts)) for chunk in _chunk_sizes(size, num_chunks)]
    pieces = [torch.split(part, [sizes[rank] for sizes in split], dim) for rank, part in enumerate(parts)]
    return torch.cat([piece[chunk] for chunk in range(num_chunks) for piece in pieces], dim)


def _chunk_sizes(size: int, number: int) -> list[int]:
    """Return the sizes of `torch.chunk`'s chunks, with 0 for each chunk that it leaves out."""
    most = -(-size // number)
    return [max(min(most, size - most * index), 0) for index in range(number)]


def _holds(mesh: Any, rank: int) -> bool:
    return mesh == rank if isinstance(mesh, int) else any(_holds(part, rank) for part in mesh)


def _unfit(name: str, why: str) -> DumpError:
    return DumpError(f"the ranks' parts of {brief(name)} cannot be joined ({why}).", remedy=_TAKE_ALL)
