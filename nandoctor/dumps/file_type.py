"""Recognises a file by its first bytes and its zip directory, before anything in it is trusted.

`torch.load` finds members of an archive regardless of case and by offsets of its own, so a file may show one pickle to
a scanner and another to torch. Here anything that two readers could read differently is refused, no memory is allocated
by sizes that the file declares, and the unpickler uses only the places that were found here.
"""

from __future__ import annotations

import mmap
import os
import shlex
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

from nandoctor.errors import DumpError
from nandoctor.machine import is_out_of_memory
from nandoctor.text import brief, brief_list

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# Bounded before zipfile makes an object of half a kilobyte for each entry; torch.save writes one for each storage.
_MAX_DIRECTORY_NBYTES = 32 << 20
_HEAD_NBYTES = 512
_MAX_PICKLE_NBYTES = 128 << 20
_MAPPED_NBYTES = 64 << 20  # from this size on files are mapped, and a replay leaves the weights there

_COPY_AGAIN = (
    "Copy it again from where it was written; if that one is short too, the disk was full or the run was killed."
)
_BEYOND = "a part of it reaches beyond its end"
_CUT_SHORT = "it is incomplete, or its zip directory is missing"
_SAVE_AGAIN = 'Save the step with torch.save({"state_dict": model.state_dict(), "image": image, "logit": logit}, path).'
_SAVE_ARRAYS = 'Save its arrays anew: torch.save(dict(numpy.load(path)), "batch.pth").'
_SAVE_ANEW = (
    "Save it anew: torch.save(torch.load(path, weights_only=True), path). If torch refuses that, as for numpy arrays, "
    "pass weights_only=False, but only if you know who wrote it."
)
_SAVE_SCRIPTED = 'Save {"state_dict": torch.jit.load(path).state_dict(), "image": image, ...} with torch.save.'
# How files of other programs begin, what they are, and what to do.
_STRANGERS = (
    # torch.save before 1.6, or with _use_new_zipfile_serialization=False, first pickles a number by protocol 2.
    (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", "of the format that torch.save wrote before torch 1.6", _SAVE_ANEW),
    (b"\x80", "a plain pickle, which cannot be read without running its code", _SAVE_AGAIN),
    (b"\x1f\x8b", "compressed with gzip", "Unpack it first: gunzip {}."),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull."),
    (b"<", "a web page or XML, not the file itself", "Download the file again, by its direct link."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member's content: its offset in the file, its length in bytes, and its CRC-32.

    The CRC is 0 if none was written: after `torch.serialization.set_crc32_options(False)`.
    """

    offset: int
    nbytes: int
    crc32: int = 0

    def of(self, data: Any) -> Any:
        """Return the content, cut from the data of the whole file."""
        return data[self.offset : self.offset + self.nbytes]


def damaged(what: str) -> DumpError:
    """Return the error for a file that was once good."""
    return DumpError(f"the file is damaged: {what}.", remedy=_COPY_AGAIN)


def hostile(what: str) -> DumpError:
    """Return the error for a file that no honest program wrote."""
    return DumpError(
        f"it is built to exhaust memory or time: {what}.",
        remedy="Do not open it, with nandoctor or anything else, unless you know who wrote it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A file that torch.save may have written, opened once: what is checked is what is loaded.

    `data` is the whole file, copied into memory if it is small, else mapped; writes to it do not reach the file.
    `pickle` is the content of the member that holds the pickle, which begins at `pickle_offset`. `storages` are the
    places of the members with the data of tensors, by the key that the pickle has for each.
    """

    path: Path
    data: mmap.mmap
    pickle: bytes
    pickle_offset: int
    storages: Mapping[str, Member]

    @property
    def nbytes(self) -> int:
        """The length of the file, in bytes."""
        return len(self.data)


def open_container(path: Path) -> Container:
    """Open the file, and check its beginning, its zip directory and its checksums.

    Raises DumpError if it is missing, unreadable, empty, cut short, altered, or not a file of torch.save.
    """
    shown = shlex.quote(brief(str(path), 1000))
    try:
        nbytes = regular_size(path)
        with path.open("rb") as file:
            head = file.peek(_HEAD_NBYTES)[:_HEAD_NBYTES]
            if head.startswith(_ZIP_MAGIC):
                return _open_archive(_open_data(file, nbytes), path)
    except FileNotFoundError as error:
        raise DumpError("there is no such file.", remedy="Check the path; a relative one starts here.") from error
    except PermissionError as error:
        raise DumpError("you have no permission to read it.", remedy=f"Give it: chmod u+r {shown}.") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        remedy = "Read it on a machine with more memory." if is_out_of_memory(error) else "Check the path."
        raise DumpError(f"it cannot be opened ({brief(str(error))}).", remedy=remedy) from error
    raise _describe_stranger(head, shown)


def directory_error(path: Path) -> DumpError:
    """Return the error for a directory in place of a file."""
    folder = shlex.quote(brief(str(path), 1000))
    remedy = (
        f"Name a file, or replay all dumps in it:\n  nandoctor triage {folder}\n"
        "A checkpoint is passed whole with --weights: Hugging Face's as it is; torch's as the file that\n"
        "  python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY weights.pt\n"
        "writes; DeepSpeed's as mp_rank_00_model_states.pt or, with ZeRO, as what this writes:\n"
        "  python zero_to_fp32.py DIRECTORY weights"
    )
    return DumpError("it is a directory, not a file.", remedy=remedy)


def _open_data(file: BufferedReader, nbytes: int) -> mmap.mmap:
    """Return the file, mapped if it is large, else copied into memory, where no later write to the file changes it."""
    if nbytes >= _MAPPED_NBYTES:
        return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
    before, copied = os.fstat(file.fileno()), mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
    num_read = file.readinto(copied)
    after = os.fstat(file.fileno())
    if num_read < nbytes or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DumpError("it changed while it was read.", remedy="Wait until it is written, and run again.")
    return copied


def regular_size(path: Path) -> int:
    """Return the size of a file, in bytes, before it is opened: opening a pipe, or reading a device, may never end.

    Raises DumpError if it is not a regular file, or is empty, and OSError if it cannot be found.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise directory_error(path)
    if not stat.S_ISREG(status.st_mode):
        raise DumpError("it is a device or a pipe, not a file.", remedy="Copy its content into a file first.")
    if status.st_size == 0:
        raise DumpError("the file is empty.", remedy=_COPY_AGAIN)
    return status.st_size


def _describe_stranger(head: bytes, path: str) -> DumpError:
    if _ZIP_MAGIC.startswith(head):
        return DumpError(f"the file is cut short after {len(head)} bytes.", remedy=_COPY_AGAIN)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return DumpError(
            "it is a safetensors file, of which only weights are read.",
            remedy=f"Pass it with the file that has the batch: nandoctor replay DUMP --weights {path}. If it holds the "
            f'batch too: torch.save(safetensors.torch.load_file(path), "batch.pth").',
        )
    for magic, kind, remedy in _STRANGERS:
        if head.lstrip().lower().startswith(magic.lower()):
            return DumpError(f"it is {kind}.", remedy=remedy.replace("{}", path))
    kind = "a text file, " if not set(head) & set(range(9)) else ""
    return DumpError(f"it is {kind}not a file that torch.save wrote.", remedy=_SAVE_AGAIN)


def _open_archive(data: mmap.mmap, path: Path) -> Container:
    members = _find_members(data)
    for name, member in members.items():  # torch writes checksums, and never reads them
        if member.crc32 and zlib.crc32(member.of(memoryview(data))) != member.crc32:
            raise damaged(f"the bytes of {name} do not match the checksum that was written with them")
    folder = next(iter(members), "").partition("/")[0]  # the first member's, as in torch
    if f"{folder}/data.pkl" not in members:
        raise DumpError(
            f"it is a zip archive that torch.save did not write: it holds {brief_list(list(members)) or 'nothing'}.",
            remedy=_SAVE_ARRAYS if folder.endswith(".npy") else _SAVE_AGAIN,
        )
    pickle, stated = members[f"{folder}/data.pkl"], members.get(f"{folder}/byteorder")
    if pickle.nbytes > _MAX_PICKLE_NBYTES:
        raise DumpError(
            f"its table of contents has {pickle.nbytes:,} bytes, more than any training step needs.",
            remedy="Save arrays as tensors or numpy arrays, not as lists of numbers.",
        )
    # Files from before torch 2.1 do not state theirs, and are little-endian.
    order = "little" if stated is None else stated.of(data)[:20].decode("latin1")
    if order != sys.byteorder:
        raise DumpError(
            f"its tensors are in the byte order {brief(order)!r}, and this machine's is {sys.byteorder!r}.",
            remedy="Load it with torch.load and save it again.",
        )
    before = f"{folder}/data/"
    storages = {name.removeprefix(before): member for name, member in members.items() if name.startswith(before)}
    return Container(path=path, data=data, pickle=pickle.of(data), pickle_offset=pickle.offset, storages=storages)


def _find_members(data: mmap.mmap) -> dict[str, Member]:
    """Return the members of the archive by name, in the order of its directory."""
    file = cast(IO[bytes], data)
    try:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined] # two readers could find two
        size = end[zipfile._ECD_SIZE] if end is not None else 0  # type: ignore[attr-defined]
        if size > _MAX_DIRECTORY_NBYTES:
            raise DumpError(
                f"its zip directory claims {size:,} bytes, more than any training step needs.",
                remedy="Save the tensors of the failing step in one flat dict.",
            )
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (MemoryError, DumpError):
        raise
    except Exception as error:  # a damaged directory makes zipfile raise nearly anything
        raise damaged(_CUT_SHORT) from error
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise DumpError("it is a TorchScript archive, which holds a program and no batch.", remedy=_SAVE_SCRIPTED)
    # torch.save stores members plain, and they are read in place.
    if any(entry.flag_bits & 1 or entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DumpError(
            "its parts are compressed or encrypted, which torch.save never does.",
            remedy="Unpack the archive, and pack it again without compression: zip -0 -r FILE.pth FOLDER.",
        )
    if any(entry.file_size != entry.compress_size for entry in entries):
        raise damaged(_BEYOND)
    if entries and min(entry.header_offset for entry in entries) != 0:
        raise damaged("there is something before its first part")
    if len({entry.filename.casefold() for entry in entries}) < len(entries):
        raise damaged("a part of it occurs twice")
    members = {entry.filename: _locate(data, entry) for entry in entries}
    in_order = sorted(members.values(), key=lambda member: (member.offset, member.nbytes))
    if any(after.offset < member.offset + member.nbytes for member, after in pairwise(in_order)):
        raise damaged("two parts of it overlap")
    return members


def _locate(data: mmap.mmap, entry: zipfile.ZipInfo) -> Member:
    """Return the member's place by its own header, which must have the same name as the directory."""
    if not 0 <= entry.header_offset <= len(data) - entry.file_size - _LOCAL_HEADER.size:
        raise damaged(_BEYOND)
    magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(data, entry.header_offset)
    start = entry.header_offset + _LOCAL_HEADER.size
    name, offset = data[start : start + name_nbytes], start + name_nbytes + extra_nbytes
    if magic != _ZIP_MAGIC or name != entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437"):
        raise damaged("a part of it is not where its zip directory says")
    if offset > len(data) - entry.file_size:
        raise damaged(_BEYOND)
    return Member(offset=offset, nbytes=entry.file_size, crc32=entry.CRC)
