"""Mutated files: whatever happens to the bytes of a dump, the reader gives a `Dump` or a `DumpError`, soon."""

from __future__ import annotations

import io
import zipfile

import forge
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nandoctor.dumps.dump import Dump, summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

STEP = forge.step() | {
    "half": torch.ones(3, dtype=torch.bfloat16),
    "weight": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "big_endian": np.arange(3, dtype=">f8"),
    "loss": np.float32(2.5),
    "nested": {"values": [1, 2.5, "text", None, (torch.zeros(1), {7})]},
}
ZIP = forge.saved(STEP)
with forge.without_checksums():
    UNCHECKED = forge.saved(STEP)
LEGACY = forge.saved(STEP, _use_new_zipfile_serialization=False)
# The legacy file without its storages, and the pickle of the zip archive: where a change is not merely another number.
LEGACY_HEAD = LEGACY.index(torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())


def pickle_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def with_pickle(pickle):
    """The zip archive with another pickle in it, whose checksum fits."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ZIP)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickle if name == "archive/data.pkl" else source.read(name))
    return buffer.getvalue()


@st.composite
def mutated(draw, original):
    """The bytes with up to four places overwritten, removed, repeated or grown, and perhaps the end cut off."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 2, 4, 16, 200]))
        change = draw(st.sampled_from(["set", "set", "flip", "delete", "repeat", "insert", "cut"]))
        if change == "set":
            data[start : start + 1] = draw(st.binary(min_size=1, max_size=1))
        elif change == "flip":
            data[start : start + 1] = bytes(value ^ 1 << draw(st.integers(0, 7)) for value in data[start : start + 1])
        elif change == "delete":
            del data[start : start + length]
        elif change == "repeat":
            data[start:start] = data[start : start + length]
        elif change == "insert":
            data[start:start] = draw(
                st.sampled_from([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"R", b"h\x01", b"(t"])
            )
        else:
            del data[start:]
    return bytes(data)


FILES = {
    "zip": mutated(UNCHECKED),
    "zip, the pickle": mutated(pickle_of(ZIP)).map(with_pickle),
    "legacy": mutated(LEGACY),
    "legacy, the pickles": mutated(LEGACY[:LEGACY_HEAD]).map(lambda head: head + LEGACY[LEGACY_HEAD:]),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_mutated_file_gives_a_dump_or_a_dump_error(kind, tmp_path):
    path = tmp_path / "dump.pth"
    complaints = []

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(FILES[kind])
    def check(data):
        path.write_bytes(data)
        try:
            dump = read_dump(path)
        except DumpError as error:
            complaints.append(str(error))
        else:
            assert isinstance(dump, Dump)
            assert summarize(dump).num_weights == len(dump.state)

    check()
    assert complaints
    assert all(complaint.count("\n") == 1 for complaint in complaints)
    assert all(complaint.replace("\n", "").isprintable() for complaint in complaints)


def test_the_files_are_sound_before_they_are_mutated(tmp_path):
    for data in (ZIP, UNCHECKED, LEGACY, with_pickle(pickle_of(ZIP))):
        (tmp_path / "dump.pth").write_bytes(data)
        dump = read_dump(tmp_path / "dump.pth")
        assert list(dump.arrays) == [
            "image",
            "mask",
            "logit",
            "half",
            "weight",
            "sparse",
            "big_endian",
            "nested.values.4.0",
        ]
