"""A batch that numpy.savez wrote is read as it is, and nothing in it is trusted."""

import io
import zipfile

import numpy as np
import pytest
import torch

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

ARRAYS = {
    "image": np.arange(6, dtype=np.float32).reshape(2, 3),
    "by_columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "foreign": np.arange(3, dtype=">i4"),
    "empty": np.zeros((0, 4), np.float16),
}


def test_arrays_are_read_as_they_are(tmp_path):
    np.savez(tmp_path / "batch.npz", scale=np.float64(0.5), **ARRAYS)
    dump = read_dump(tmp_path / "batch.npz")
    assert dump.layout == "batch-only"
    assert dump.scalars == {"scale": 0.5}
    for name, array in ARRAYS.items():
        assert torch.equal(dump.arrays[name], torch.from_numpy(np.array(array, array.dtype.newbyteorder("="))))


def header(descr, shape):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no array", "not an array of numpy"),
        (header("<f4", (1 << 40,)) + bytes(8), "contradict each other"),
        (header("<f4", (4,)) + bytes(8), "contradict each other"),
        (header("|O", (1,)) + b"cos\nsystem\n(S'false'\ntR.", "an array of O"),
        (header([("a", "<f4")], (1,)) + bytes(4), "an array of V4"),
    ],
)
def test_what_a_header_claims_is_not_trusted(content, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "batch.npz", "w") as archive:
        archive.writestr("image.npy", content)
    with pytest.raises(DumpError, match=message):
        read_dump(tmp_path / "batch.npz")


def test_a_changed_byte_is_told(tmp_path):
    np.savez(tmp_path / "batch.npz", **ARRAYS)
    data = bytearray((tmp_path / "batch.npz").read_bytes())
    data[data.index(ARRAYS["image"].tobytes()) + 5] ^= 1
    (tmp_path / "batch.npz").write_bytes(data)
    with pytest.raises(DumpError, match="do not match the checksum"):
        read_dump(tmp_path / "batch.npz")
