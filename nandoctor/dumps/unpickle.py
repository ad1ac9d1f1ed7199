"""Builds what the pickle of a dump describes, from the very bytes that were scanned.

torch's weights-only unpickler does the work. It is given the tensors' data by place, for `torch.load` would look the
members up by rules of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.storage import TypedStorage, UntypedStorage

from nandoctor.dumps.file_type import Container
from nandoctor.dumps.numpy_pickle import STAND_INS
from nandoctor.dumps.pickled_containers import CONTAINERS, StandIns
from nandoctor.dumps.signature import MEMBER, Provenance, check_signature
from nandoctor.dumps.zip_members import Member, damaged
from nandoctor.process_wide import Patch, Shared, patched
from nandoctor.torch_compat import sparse_indices, sparse_values, unpickle_weights
from nandoctor.torch_places import ALLOWED_GLOBALS

# A memory map begins at a page; torch's kernels want an element at a multiple of its size, 16 at most.
_ALIGNMENT = 16
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_STAND_INS = StandIns({**STAND_INS, **CONTAINERS})


def load_pickle(container: Container) -> tuple[object, Provenance]:
    """Build the object, with `DumpError` or whatever torch raises where the file contradicts itself."""
    with _only_stand_ins():
        if container.members is None:
            file: Any = container.data  # a mmap reads and seeks
            saved: object = torch.load(file, map_location=_fixed, weights_only=True)
            provenance = Provenance()
        else:
            provenance = _judge(container)
            data = torch.frombuffer(container.data, dtype=torch.uint8).untyped_storage()
            saved = unpickle_weights(container.pickle, _storage_reader(container.storages, data))
    _make_sound(saved)
    return saved, provenance


def _make_sound(saved: object) -> None:
    """Take off the attributes that a pickle gave to tensors and mappings: one called "numel" hides the method.

    Raises:
        RuntimeError: a sparse tensor has elements outside of it.
    """
    waiting, seen = [saved], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (torch.Tensor, dict)):
            getattr(item, "__dict__", {}).clear()
        if isinstance(item, torch.Tensor) and item.layout in _SPARSE:
            _check_sparse_indices(item)
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set)):
            waiting += item


def _storage_reader(members: Mapping[str, Member], data: UntypedStorage) -> Callable[[Any], object]:
    """What gives the unpickler the storage that the pickle names, each once."""
    built: dict[str, TypedStorage] = {}

    def read(reference: Any) -> TypedStorage:
        _, kind, key, _, numel = reference
        dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        if key not in built:
            member = members[key]
            if numel * dtype.itemsize != member.nbytes:
                raise damaged("the data of a tensor is missing or of another size")
            make: Any = TypedStorage
            built[key] = make(wrap_storage=_slice(data, member), dtype=dtype, _internal=True)
        return built[key]

    return read


def _slice(data: UntypedStorage, member: Member) -> UntypedStorage:
    storage: Any = data[member.offset : member.offset + member.nbytes]
    return cast(UntypedStorage, _fixed(storage) if member.offset % _ALIGNMENT else storage)


def _fixed(storage: Any, _location: str = "") -> Any:
    """A copy that does not grow: torch makes a storage of its own as large as a tensor claims to be, not filled."""
    values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return torch.from_numpy(values.numpy().copy()).untyped_storage()


def _judge(container: Container) -> Provenance:
    """Check the signature over the bytes that are unpickled and mapped."""
    assert container.members is not None
    name = f"{container.folder}/{MEMBER}"
    if name not in container.members:
        return Provenance()
    data = memoryview(container.data)
    members = {
        other: data[member.offset : member.offset + member.nbytes] for other, member in container.members.items()
    }
    signature = bytes(members.pop(name))
    return check_signature(signature, {**members, f"{container.folder}/data.pkl": container.pickle})


class _Reading(threading.local):
    """What this thread is doing."""

    under_way = False


_reading = _Reading()


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Allow this thread's unpickler numpy's names, as stand-ins, and nothing that the process has allowed by itself.

    What other threads load meanwhile is judged by the process's own list, which stays as it is.
    """
    _reading.under_way = True
    try:
        with _allowed_by_thread:
            yield
    finally:
        _reading.under_way = False


def _allow_by_thread(allowed: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
    return lambda: _STAND_INS if _reading.under_way else allowed()


_allowed_by_thread = Shared(lambda: patched([Patch(ALLOWED_GLOBALS, _allow_by_thread)]))


def _check_sparse_indices(tensor: torch.Tensor) -> None:
    """Check that the elements of a sparse tensor lie in it: torch loads any, and its kernels read and write there.

    Raises:
        DumpError: it claims more elements than the file holds, which would be counted through.
        RuntimeError: one does not.
    """
    values = sparse_values(tensor)
    _check_stored(values)
    if tensor.layout is torch.sparse_coo:
        is_coalesced = tensor.is_coalesced()
        indices = sparse_indices(tensor)
        _check_stored(indices)
        torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True, is_coalesced=is_coalesced)
        return
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed, plain = (
        (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    )
    _check_stored(compressed)
    _check_stored(plain)
    torch.sparse_compressed_tensor(compressed, plain, values, tensor.shape, layout=tensor.layout, check_invariants=True)


def _check_stored(part: torch.Tensor) -> None:
    if part.numel() * part.element_size() > part.untyped_storage().nbytes():
        raise damaged("a sparse tensor claims more elements than it has")
