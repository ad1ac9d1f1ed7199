"""Where the members of a zip archive lie, read strictly: what two readers could understand differently is refused.

Nothing is allocated by what the file declares.

`torch.load` finds members regardless of case and by offsets of its own, so that a file may show one pickle to a scanner
and another to torch. Here the scan and the loader use these places and nothing else.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import IO, cast

from nandoctor.errors import DumpError

_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_END_NBYTES, _END64_NBYTES = 22, 56
_MAX_COMMENT = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# zipfile makes an object of half a kilobyte out of each entry; torch.save writes one for each storage.
_MAX_DIRECTORY_NBYTES = 32 << 20

COPY_AGAIN = (
    "Copy it again from where it was written; if that one is short too, the disk was full or the run was killed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member's content: where it begins in the file, and its length in bytes."""

    offset: int
    nbytes: int


def damaged(what: str) -> DumpError:
    """The error for a file that was once good."""
    return DumpError(f"the file is damaged: {what}.", remedy=COPY_AGAIN)


def find_members(data: mmap, begin: int = 0) -> dict[str, Member]:
    """The members of the archive that begins there, by name and in the order of its directory.

    Raises:
        DumpError: it is cut short, encrypted, compressed, or its parts overlap or share a name.
    """
    _check_directory(data)
    try:
        with zipfile.ZipFile(cast(IO[bytes], data)) as archive:
            entries = archive.infolist()
    except MemoryError:
        raise
    except Exception as error:  # a damaged directory makes zipfile raise nearly anything
        raise _cut_short() from error
    for entry in entries:
        _check_entry(entry)
    if entries and min(entry.header_offset for entry in entries) != begin:
        raise damaged("something stands before its first part")
    if len({entry.filename.casefold() for entry in entries}) < len(entries):
        raise damaged("a part of it occurs twice")
    members = {entry.filename: _locate(data, entry) for entry in entries}
    _check_overlap(members.values())
    return members


def read_member(data: mmap, member: Member) -> bytes:
    """The content of a member."""
    return data[member.offset : member.offset + member.nbytes]


def _check_directory(data: mmap) -> None:
    """Bound the directory before zipfile makes objects of it."""
    tail = data[-(_MAX_COMMENT + _END_NBYTES + _END64_NBYTES + 20) :]
    end = tail.rfind(_END)
    if end < 0 or len(tail) - end < _END_NBYTES:
        raise _cut_short()
    size = int.from_bytes(tail[end + 12 : end + 16], "little")
    end64 = tail.rfind(_END64, 0, end)
    if end64 >= 0:
        size = max(size if size < 0xFFFFFFFF else 0, int.from_bytes(tail[end64 + 40 : end64 + 48], "little"))
    if size > _MAX_DIRECTORY_NBYTES:
        raise DumpError(
            f"its zip directory claims {size:,} bytes, more than any step of training needs.",
            remedy="Save the tensors of the failing step in one flat dict.",
        )


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """torch.save stores its members plain, and the memory map reads them in place: nothing may unfold to more."""
    if entry.flag_bits & 1:
        raise DumpError("it is an encrypted zip archive.", remedy="Unpack it with its password first.")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise DumpError(
            "its parts are compressed, which torch.save never does.",
            remedy="Unpack the archive, and pack it again without compression: zip -0 -r FILE.pth FOLDER.",
        )
    if entry.file_size != entry.compress_size:
        raise damaged("a part of it reaches beyond its end")


def _locate(data: mmap, entry: zipfile.ZipInfo) -> Member:
    """The member's place, by its own header; that must carry the name that the directory has."""
    if not 0 <= entry.header_offset <= len(data) - entry.file_size - _LOCAL_HEADER.size:
        raise damaged("a part of it reaches beyond its end")
    magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack_from(data, entry.header_offset)
    start = entry.header_offset + _LOCAL_HEADER.size
    name, offset = data[start : start + name_nbytes], start + name_nbytes + extra_nbytes
    if magic != b"PK\x03\x04" or name != entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437"):
        raise damaged("a part of it is not where its zip directory says")
    if offset > len(data) - entry.file_size:
        raise damaged("a part of it reaches beyond its end")
    return Member(offset=offset, nbytes=entry.file_size)


def _check_overlap(members: Iterable[Member]) -> None:
    end = 0
    for member in sorted(members, key=lambda member: (member.offset, member.nbytes)):
        if member.offset < end:
            raise damaged("two parts of it overlap")
        end = member.offset + member.nbytes


def _cut_short() -> DumpError:
    return damaged("it is cut short or its zip directory is gone")


def common_folder(members: Mapping[str, Member]) -> str:
    """The archive's own folder: that of its first member, as torch takes it."""
    return next(iter(members), "").partition("/")[0]
