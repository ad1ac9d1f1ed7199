"""Reads a model's weights from a directory of torch.distributed.checkpoint (DCP) without running its pickled code.

The directory holds `.metadata`, a pickle that says where each tensor lies, and files of parts, each part an archive of
torch.save: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html

The metadata is scanned like a dump, and its classes are replaced by inert ones. Parts lie at unaligned offsets, where
no kernel may read them, so they are copied to unnamed files.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from operator import gt
from pathlib import Path
from typing import Any

import torch

from nandoctor.dumps.classify import check_weights, choose_state
from nandoctor.dumps.file_type import damaged, regular_size
from nandoctor.dumps.pickle_scan import named_globals
from nandoctor.dumps.reader import read_part
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.dumps.tensors import TorchValues
from nandoctor.errors import DumpError
from nandoctor.file_memory import map_empty
from nandoctor.text import brief, brief_list, plural

_MAX_NBYTES = 512 << 20
_MAX_INSTRUCTIONS = 10_000_000
_MAX_STRIDE = (1 << 63) - 1
_PACKAGE = "torch.distributed.checkpoint"


class _Record:
    """A stand-in for any object of the metadata, which only keeps its fields."""

    fields: Mapping[str, Any] = {}

    def __new__(cls, *_: object) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, dict) else {"values": state}


class _Tensor(_Record):
    """A stand-in for the description of a tensor; descriptions of other values are not used."""


class _Size(_Record):
    """A stand-in for `torch.Size` that makes a plain tuple."""

    def __new__(cls, sizes: object = ()) -> Any:
        return _checked_sizes(sizes)


_STAND_INS: Mapping[str, Any] = {
    "torch.Size": _Size,
    "torch.serialization._get_layout": _Record,
    f"{_PACKAGE}.metadata.TensorStorageMetadata": _Tensor,
    **{
        f"{_PACKAGE}.{name}": _Record
        for name in (
            *("metadata.Metadata", "metadata.MetadataIndex", "metadata.StorageMeta", "metadata.TensorProperties"),
            *("metadata.ChunkStorageMetadata", "metadata.BytesStorageMetadata", "metadata._MEM_FORMAT_ENCODING"),
            "filesystem._StorageInfo",
        )
    },
    **{f"{module}.{kind}Path": _Record for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
}


def read_distributed(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the state dict of the model in the directory.

    Raises:
        DumpError: it is damaged or hostile, or holds no tensors.
        OSError: a file cannot be read.
    """
    metadata = _read_metadata(folder / ".metadata")
    described = {
        name: item for name, item in _mapping(metadata, "state_dict_metadata").items() if isinstance(item, _Tensor)
    }
    names = _choose_names(list(described), _mapping(metadata, "planner_data"))
    parts: dict[str, list[tuple[_Record, _Record]]] = {name: [] for name in names}
    for index, place in _mapping(metadata, "storage_data").items():
        name = index.fields.get("fqn") if isinstance(index, _Record) and isinstance(place, _Record) else None
        if isinstance(name, str) and name in parts:
            parts[name].append((index, place))
    files = _Files(folder)
    if not files.nbytes:
        raise DumpError(
            "the files with the tensors (.distcp) are not in it.",
            remedy="Put the files of all ranks into one directory.",
        )
    state = {names[name]: _join(name, described[name], parts[name], files) for name in names}
    return check_weights(state, files.nbytes, TorchValues())


class _Unpickler(pickle.Unpickler):
    """An unpickler that builds records from a scanned pickle, and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for the class."""
        known = _find(f"{module}.{name}")
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return known


def _find(name: str) -> Any:
    """Return the stand-in for a class or function of the metadata, or None if it does not belong there."""
    module, _, attribute = name.rpartition(".")
    dtype = getattr(torch, attribute, None) if module == "torch" else None
    return dtype if isinstance(dtype, torch.dtype) else _STAND_INS.get(name)


def _read_metadata(path: Path) -> _Record:
    if regular_size(path) > _MAX_NBYTES:
        raise damaged("its metadata is larger than that of any model")
    pickled = path.read_bytes()
    unknown = sorted(name for name in named_globals(pickled, max_instructions=_MAX_INSTRUCTIONS) if not _find(name))
    if unknown:
        raise DumpError(
            f"its metadata would run code that a table of tensors does not need: {brief_list(unknown)}.",
            remedy="Do not open it if you do not know who wrote it; else make one file of it: python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY weights.pt.",
        )
    try:
        metadata = _Unpickler(io.BytesIO(pickled)).load()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle makes it raise nearly anything
        raise damaged("its metadata is invalid") from error
    if not isinstance(metadata, _Record):
        raise damaged("its metadata is not a table of tensors")
    return metadata


def _mapping(record: _Record, name: str) -> Mapping[Any, Any]:
    found = record.fields.get(name) or {}
    if type(found) is not dict:
        raise damaged(f"{name} in its metadata is not a mapping")
    return found


def _choose_names(tensors: Sequence[object], paths: Mapping[Any, Any]) -> dict[str, str]:
    """Return the names of the model's tensors, each with its name in the state dict; an optimizer's are left out."""
    groups: dict[str, dict[str, str]] = {}
    for name in tensors:
        path = paths.get(name)
        if not isinstance(name, str):
            raise damaged("a name in its metadata is not a string")
        places = [str(part) for part in path] if isinstance(path, tuple) and path else [name]
        if not any(place.startswith("optim") for place in places[:-1]):
            groups.setdefault(".".join(places[:-1]), {})[name] = places[-1]
    if not groups:
        raise DumpError("it holds no tensors of a model.", remedy="Give the directory of the model's own checkpoint.")
    tables: Any = groups  # chosen by names and lengths alone
    return groups[choose_state(tables)]


class _Files:
    """The files of parts. Joining copies parts, so the total that is read is bounded by the size of the files."""

    def __init__(self, folder: Path) -> None:
        self._names = {path.name for path in folder.glob("*.distcp") if path.is_file()}
        self._folder = folder
        self.nbytes = self._left = sum((folder / name).stat().st_size for name in self._names)

    def read(self, place: _Record) -> torch.Tensor:
        """Return the tensor at that place."""
        name, offset, length = (place.fields.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or name not in self._names or type(offset) is not int or type(length) is not int:
            told = brief(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise DumpError(
                f"{told}, which holds a part of the weights, is not in it.",
                remedy="Put the files of all ranks into one directory.",
            )
        if place.fields.get("transform_descriptors"):
            raise DumpError("its parts are compressed.", remedy="Save it without extensions.")
        self._left -= length
        if self._left < 0:
            raise damaged("it claims more weights than it holds")
        part = read_part(self._folder / name, offset, length)
        if not is_dense(part):
            raise damaged("a part of it is not a plain tensor")
        if part.numel() * part.element_size() > length:
            raise damaged("a part of it claims more values than it holds")
        return part


def _join(name: str, described: _Record, parts: Sequence[tuple[_Record, _Record]], files: _Files) -> torch.Tensor:
    shape = _checked_sizes(described.fields.get("size"))
    numel = math.prod(shape)
    if not parts or numel > files.nbytes or math.prod(max(size, 1) for size in shape) > _MAX_STRIDE:
        raise _unfit(name, f"{numel:,} values in {plural(len(parts), 'part')}")
    whole: torch.Tensor | None = None
    is_filled = map_empty(shape, torch.bool)
    for index, place in parts:
        part, offset = files.read(place), _checked_sizes(index.fields.get("offset"))
        whole = map_empty(shape, part.dtype) if whole is None else whole
        ends = [start + size for start, size in zip(offset, part.shape, strict=False)]
        if part.dtype != whole.dtype or not len(offset) == part.dim() == whole.dim() or any(map(gt, ends, shape)):
            raise _unfit(name, f"{tuple(part.shape)} at {tuple(offset)} in {tuple(whole.shape)}")
        box = tuple(map(slice, offset, ends))
        if is_filled[box].any():
            raise _unfit(name, "they overlap")
        whole[box], is_filled[box] = part, True
    if whole is None or not is_filled.all():
        raise _unfit(name, "values are missing")
    return whole


def _checked_sizes(sizes: object) -> tuple[int, ...]:
    """Return the sizes if they are a tuple of integers, 0 or more; else raise DumpError."""
    if type(sizes) is not tuple or not all(type(size) is int and 0 <= size < 1 << 60 for size in sizes):
        raise damaged("a size in its metadata is invalid")
    return sizes


def _unfit(name: str, why: str) -> DumpError:
    return damaged(f"the parts of {brief(name)} do not cover it ({why})")
