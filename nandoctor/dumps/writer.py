"""Writes a `nandoctor.dump/1` file: whole or not at all, and never over another file."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nandoctor.dumps.packing import map_tensors
from nandoctor.dumps.signature import sign
from nandoctor.dumps.stored_tensor import COMPUTED_DTYPES
from nandoctor.text import dtype_name

_CAN_LOCK = os.name == "posix"  # on Windows an open file cannot be deleted anyway
if _CAN_LOCK:
    import fcntl


def write_dump(contents: Mapping[str, Any], folder: Path, stem: str) -> Path:
    """Write `contents` into a new file `stem.pth` in `folder`, or `stem-2.pth` and so on if that exists.

    Tensors are copied to the CPU, without the parts of their storage that they do not use. The name appears when every
    byte is on the disk. Raises OSError, and leaves no file, if the folder cannot be written to, or the disk is full.
    """
    contents = _on_cpu(contents)
    folder.mkdir(parents=True, exist_ok=True)
    remove_orphans(folder)
    file, temporary = _locked_file(folder, stem)
    try:
        with file:
            torch.save(contents, file)
            sign(file)
            file.flush()
            os.fsync(file.fileno())
            return _publish(temporary, folder, stem)  # while the lock is held
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _locked_file(folder: Path, stem: str) -> tuple[BinaryIO, Path]:
    """Open a new temporary file, locked while it is open so that no process takes it for an orphan.

    Another rank may do so before it is locked: the lock then waits until that rank has deleted it.
    """
    while True:
        temporary = folder / f".{stem}-{secrets.token_hex(4)}.tmp"
        file = temporary.open("x+b")  # not tempfile's, which only this user could read
        _lock(file.fileno(), wait=True)
        if temporary.exists():
            return file, temporary
        file.close()


def remove_orphans(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while writing, and so no longer hold their lock."""
    for path in folder.glob(".*-step*.tmp") if _CAN_LOCK else ():
        with suppress(OSError), path.open("rb") as file:
            if _lock(file.fileno(), wait=False):
                path.unlink(missing_ok=True)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock the file against other writers until it is closed, also by the end of the process; return True if it is."""
    if not _CAN_LOCK:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # locked by another, or a file system without locks
        return False
    return True


def _publish(temporary: Path, folder: Path, stem: str) -> Path:
    """Give the file its name, the first that is free: linking fails if a name is taken, renaming would not."""
    for number in itertools.count(1):
        path = folder / (f"{stem}.pth" if number == 1 else f"{stem}-{number}.pth")
        try:
            os.link(temporary, path)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links: reserve the name first, with an empty file
            try:
                path.open("xb").close()
            except FileExistsError:
                continue
            temporary.replace(path)
        # Put the folder's new entry on the disk; systems that cannot open a folder lose it only in a power failure.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return path
    raise AssertionError("there is always another number")


def _on_cpu(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents with every tensor on the CPU, in a storage of its own size; what was one tensor stays one.

    A batch and the same batch on the device become one as well, if their values agree; two tensors of one part of the
    contents do not. A tensor that has no values to copy (on the meta device, nested) becomes None, and `left_out` says
    so.
    """
    by_place: dict[tuple[Any, ...], torch.Tensor] = {}
    by_format: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    parts: dict[int, set[str]] = {}
    left_out = list(contents.get("left_out", []))

    def copy(part: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested:
            raise TypeError("no torch reads a nested tensor without running code that the file names")
        if dtype_name(tensor.dtype) not in COMPUTED_DTYPES:
            raise TypeError("no reader takes quantized tensors, or what torch only stores")
        tensor = tensor.to_dense() if tensor.is_mkldnn else tensor
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu()
        # Subclasses that wrap other tensors all report address 0.
        address = tensor.data_ptr() or id(tensor)
        place = (str(tensor.device), address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if place not in by_place:
            made = _compact(tensor)
            same_format = by_format.setdefault((tuple(made.shape), made.dtype), [])
            of_others = (other for other in same_format if part not in parts[id(other)] and torch.equal(other, made))
            by_place[place] = next(of_others, made)
            if by_place[place] is made:
                same_format.append(made)
        parts.setdefault(id(by_place[place]), set()).add(part)
        return by_place[place]

    def copy_or_drop(part: str, tensor: torch.Tensor) -> torch.Tensor | None:
        try:
            copied = copy(part, tensor)
            # torch.save would fail at this only after everything else is written.
            copied.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError, KeyError) as error:
            left_out.append(f"{part}: a tensor that cannot be saved ({type(error).__name__})")
            return None
        return copied

    copied = {part: map_tensors(tree, functools.partial(copy_or_drop, part)) for part, tree in contents.items()}
    return {**copied, "left_out": left_out}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU; a tensor that is there and fills its storage is not copied."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
    layouts = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    layout = next((layout for layout in layouts if plain.is_contiguous(memory_format=layout)), None)
    if layout is None or plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
        return plain.clone(memory_format=layout or torch.contiguous_format)
    return plain
