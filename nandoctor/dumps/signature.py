"""Tells dumps that this user's own recorder wrote from all others, by a signature in the archive's comment.

The signature is HMAC-SHA256 over all bytes of the file before it, so any other byte, or one more, makes it invalid.
Its key, which only this user can read, is made once, in the user's configuration folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import click

_HEADER = "nandoctor.signature/2"
_KEY_NBYTES = 32
_CHUNK_NBYTES = 1 << 20
_LENGTH_NBYTES = 2
"""Bytes of the comment's length, the last field of a zip archive."""
_COMMENT_NBYTES = len(_HEADER) + 2 * 64 + 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What is known about who wrote a file.

    `own`: this user's recorder did, and it is unchanged. `here`: it did so in this working directory. `detail` says why
    the file is not known to be the user's own.
    """

    own: bool = False
    here: bool = False
    detail: str = "it carries no signature"


def sign(file: IO[bytes]) -> None:
    """Add a signature to the archive that torch has just written to `file`, open for reading and writing.

    The file stays as it is if there is no key and none can be made. Raises OSError if the disk is full.
    """
    key = _make_key() or read_key()[0]
    if key is None:
        return
    file.seek(-_LENGTH_NBYTES, os.SEEK_END)  # of an empty comment
    file.write(_COMMENT_NBYTES.to_bytes(_LENGTH_NBYTES, "little"))
    file.seek(0)
    where = _directory_tag(key)
    mac = _compute_mac(key, where, iter(partial(file.read, _CHUNK_NBYTES), b""))
    file.write(f"{_HEADER}\n{where}\n{mac}\n".encode())


def check_signature(before: memoryview, pickle: bytes, after: memoryview) -> Provenance:
    """Return who wrote a file, by its pickle as it was read, and the bytes of the file before and after that."""
    comment = bytes(after[-_COMMENT_NBYTES:]).decode("ascii", "replace")
    header, where, given, *_ = [*comment.split("\n"), "", ""]
    if header != _HEADER:
        return Provenance()
    key, why = read_key()
    if key is None:
        return Provenance(detail=why)
    mac = _compute_mac(key, where, (before, pickle, after[:-_COMMENT_NBYTES]))
    if not hmac.compare_digest(mac.encode(), given.encode()):
        return Provenance(detail="it was signed with another key, or altered since")
    return Provenance(own=True, here=hmac.compare_digest(where, _directory_tag(key)), detail="")


def read_key() -> tuple[bytes | None, str]:
    """Return the key, or None and the reason; a key that others may read, or put there, is refused."""
    path = _key_path()
    if not path.is_file():  # opening a pipe would wait forever
        return None, "this user has no key yet"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * _KEY_NBYTES)
    except OSError as error:
        return None, f"your key cannot be read ({error.strerror})"
    if os.name == "posix" and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
        return None, f"others may read or change your key: chmod 600 {path}"
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    return (key, "") if len(key) == _KEY_NBYTES else (None, f"{path} is not a valid key: delete it")


def _key_path() -> Path:
    """Return the key's path, in the folder for this user's configuration: the one given, or the platform's default."""
    if given := os.environ.get("NANDOCTOR_CONFIG_DIR"):
        return Path(given) / "signing-key"
    folder = Path(click.get_app_dir("nandoctor"))
    # https://specifications.freedesktop.org/basedir-spec: a relative path is to be ignored.
    return (folder if folder.is_absolute() else Path.home() / ".config" / "nandoctor") / "signing-key"


def _make_key() -> bytes | None:
    """Make a new key; return None if there is one, or the folder cannot be written to, or has no hard links.

    It is written under another name and then linked: if two processes start together, one whole key remains.
    """
    path = _key_path()
    if path.exists():
        return None
    key = secrets.token_bytes(_KEY_NBYTES)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # which nobody else may read
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key.hex() + "\n")
        os.link(draft, path)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return key


def _compute_mac(key: bytes, where: str, content: Iterable[bytes | memoryview]) -> str:
    """Return the MAC of a file's content and of its working directory's tag, which has a fixed length."""
    mac = hmac.new(key, f"{_HEADER}\n{where}\n".encode(), hashlib.sha256)
    for part in content:
        mac.update(part)
    return mac.hexdigest()


def _directory_tag(key: bytes) -> str:
    """Return a tag of the working directory that only the owner of the key can check, and that hides its path."""
    return hmac.new(key, b"directory\0" + os.fsencode(Path.cwd().resolve()), hashlib.sha256).hexdigest()
