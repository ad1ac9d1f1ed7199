"""What kind of file it is, told from its first bytes and its zip directory before anything in it is believed.

In: a path. Out: `Container`, or a DumpError that says what the file is instead.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nandoctor.dumps.text import printable
from nandoctor.errors import DumpError

# torch.save before 1.6, or with _use_new_zipfile_serialization=False, begins with this number pickled by protocol 2.
LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_ZIP_MAGIC = b"PK\x03\x04"
_HEAD_NBYTES = 512

_SAVE_AGAIN = 'Save the step with torch.save({"state_dict": model.state_dict(), "image": image, "logit": logit}, path).'
_COPY_AGAIN = (
    "Copy it again from where it was written; if that one is short too, the disk was full or the run was killed."
)
_STRANGERS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, h5py)", _SAVE_AGAIN),
    (b"\x89PNG", "a PNG image", "Give the .pth file that was saved beside it."),
    (b"\xff\xd8\xff", "a JPEG image", "Give the .pth file that was saved beside it."),
    (b"\x93NUMPY", "a .npy array", _SAVE_AGAIN),
    (b"\x1f\x8b", "compressed with gzip", "Unpack it first: gunzip FILE."),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "Unpack it first: unzstd FILE."),
    (b"\xfd7zXZ", "compressed with xz", "Unpack it first: unxz FILE."),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull."),
    (b"<", "a web page or XML, not the file itself", "Download the file again, by its direct link."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A file that torch.save may have written.

    `pickle` is the member of the zip archive that holds the pickle, and `storages` the sizes in bytes of the tensors'
    data, by key; both None where the file is of the older format, some pickles in a row and then the data.
    """

    path: Path
    nbytes: int
    pickle: str | None = None
    storages: Mapping[str, int] | None = None


def open_container(path: Path) -> Container:
    """Look at the file's beginning and, where it is a zip archive, at its directory.

    Raises:
        DumpError: it is missing, unreadable, empty, cut short, or nothing that torch.save writes.
    """
    try:
        nbytes = _regular_size(path)
        with path.open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except FileNotFoundError as error:
        raise DumpError("there is no such file.", remedy="Check the path; a relative one starts here.") from error
    except PermissionError as error:
        raise DumpError("this user may not read it.", remedy="Give read permission: chmod u+r FILE.") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise DumpError(f"it cannot be opened ({printable(str(error))}).", remedy="Check the path.") from error
    if head.startswith(_ZIP_MAGIC):
        return _open_archive(path, nbytes)
    if head.startswith(LEGACY_MAGIC):
        return Container(path=path, nbytes=nbytes)
    raise _describe_stranger(head)


def damaged(what: str) -> DumpError:
    """The error for a file that was once good."""
    return DumpError(f"the file is damaged: {what}.", remedy=_COPY_AGAIN)


def _regular_size(path: Path) -> int:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise DumpError(
            "it is a directory, not a file.",
            remedy="Give the .pth file in it; a distributed checkpoint becomes one with "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE.",
        )
    if not stat.S_ISREG(status.st_mode):
        raise DumpError("it is a device or a pipe, not a file.", remedy="Copy its content into a file first.")
    if status.st_size == 0:
        raise DumpError("the file is empty.", remedy=_COPY_AGAIN)
    return status.st_size


def _describe_stranger(head: bytes) -> DumpError:
    if _ZIP_MAGIC.startswith(head) or LEGACY_MAGIC.startswith(head):
        return DumpError(f"the file is cut short after {len(head)} bytes.", remedy=_COPY_AGAIN)
    for magic, kind, remedy in _STRANGERS:
        if head.lstrip().lower().startswith(magic.lower()):
            return DumpError(f"it is {kind}.", remedy=remedy)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return DumpError(
            "it is a safetensors file, which holds weights only.",
            remedy="Convert it: torch.save(safetensors.torch.load_file(path), 'weights.pth').",
        )
    if head[257:262] == b"ustar":
        return DumpError("it is a tar archive.", remedy="Unpack it first: tar xf FILE.")
    if head[:1] == b"\x80" and 1 < head[1] <= 5:
        return DumpError("it is a plain pickle, which cannot be read without running its code.", remedy=_SAVE_AGAIN)
    kind = "a text file" if not set(head) & set(range(9)) else "not a file that torch.save wrote"
    return DumpError(f"it is {kind}.", remedy=_SAVE_AGAIN)


def _open_archive(path: Path, nbytes: int) -> Container:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # a damaged directory makes zipfile raise nearly anything
        raise damaged("it is cut short or its zip directory is gone") from error
    _check_members(members, nbytes)
    sizes = {member.filename: member.file_size for member in members}
    # torch takes the folder of the first member for the archive's own.
    folder = next(iter(sizes), "").split("/")[0]
    if f"{folder}/constants.pkl" in sizes:
        raise DumpError(
            "it is a TorchScript program, not a dump.",
            remedy="Save torch.jit.load(path).state_dict() with torch.save, and the batch with it.",
        )
    if f"{folder}/data.pkl" not in sizes:
        raise _describe_archive(list(sizes))
    data = f"{folder}/data/"
    storages = {name.removeprefix(data): size for name, size in sizes.items() if name.startswith(data)}
    return Container(path=path, nbytes=nbytes, pickle=f"{folder}/data.pkl", storages=storages)


def _check_members(members: list[zipfile.ZipInfo], nbytes: int) -> None:
    """torch.save stores its members plain, and the memory map reads them in place: nothing may unfold to more."""
    for member in members:
        if member.flag_bits & 1:
            raise DumpError("it is an encrypted zip archive.", remedy="Unpack it with its password first.")
        if member.compress_type != zipfile.ZIP_STORED:
            raise DumpError(
                "its parts are compressed, which torch.save never does.",
                remedy="Unpack the archive, and pack it again without compression: zip -0 -r FILE.pth FOLDER.",
            )
        if member.file_size != member.compress_size or not 0 <= member.header_offset <= nbytes - member.file_size:
            raise damaged("a part of it reaches beyond its end")
    if len({member.filename for member in members}) < len(members):
        raise damaged("a part of it occurs twice")


def _describe_archive(names: list[str]) -> DumpError:
    if names and all(name.endswith(".npy") for name in names):
        return DumpError("it is a .npz archive of numpy, without weights.", remedy=_SAVE_AGAIN)
    if "config.json" in names and "metadata.json" in names:
        return DumpError("it is a Keras model.", remedy=_SAVE_AGAIN)
    return DumpError("it is a zip archive that torch.save did not write.", remedy=_SAVE_AGAIN)
