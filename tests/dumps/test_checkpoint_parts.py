"""Tensors of torch.distributed.checkpoint in several parts: joined where they cover it exactly once, else refused."""

from __future__ import annotations

import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nandoctor.dumps.weights import read_weights
from nandoctor.errors import DumpError

W = torch.arange(32.0).view(8, 4)
FILE = "__0_0.distcp"


def write(folder, parts, size=W.shape):
    """A checkpoint whose one tensor "a.weight" is in these parts, pairs of an offset and a tensor."""
    data, places, chunks = b"", {}, []
    for offset, part in parts:
        file = io.BytesIO()
        torch.save(part, file)
        places[MetadataIndex("a.weight", torch.Size(offset))] = _StorageInfo(FILE, len(data), file.tell())
        chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
        data += file.getvalue()
    described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)
    save_metadata(folder, Metadata({"a.weight": described}, {"a.weight": ("a.weight",)}, places))
    (folder / FILE).write_bytes(data)


def save_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def at(rows, columns=slice(0, 4)):
    return (rows.start, columns.start), W[rows, columns].clone()


UPPER, LOWER, MIDDLE = at(slice(0, 4)), at(slice(4, 8)), at(slice(2, 6))
WHOLE = {
    "one": [at(slice(0, 8))],
    "rows": [LOWER, UPPER],
    "a pinwheel": [
        at(slice(0, 3), slice(0, 3)),
        at(slice(0, 6), slice(3, 4)),
        at(slice(6, 8), slice(1, 4)),
        at(slice(3, 8), slice(0, 1)),
        at(slice(3, 6), slice(1, 3)),
    ],
    "with an empty part": [UPPER, LOWER, ((8, 0), W[8:].clone())],
}
NOT_WHOLE = {
    "overlapping, as many values as the whole": [UPPER, MIDDLE],
    "the same part twice": [UPPER, UPPER],
    "overlapping, all covered": [at(slice(0, 8)), MIDDLE],
    "a hole": [UPPER],
    "a diagonal, twice": [at(slice(0, 4), slice(0, 2)), at(slice(4, 8), slice(2, 4))] * 2,
    "corners, and the centre twice": [
        *(at(slice(row, row + 2), slice(column, column + 2)) for row in (0, 6) for column in (0, 2)),
        at(slice(2, 6)),
        at(slice(3, 5), slice(0, 4)),
    ],
    "beyond the end": [UPPER, ((6, 0), W[4:].clone())],
    "another format": [UPPER, ((4, 0), W[4:].half())],
}


@pytest.mark.parametrize("kind", WHOLE)
def test_parts_that_cover_a_tensor_are_joined(kind, tmp_path):
    write(tmp_path, WHOLE[kind])
    assert torch.equal(read_weights(tmp_path)["a.weight"], W)


@pytest.mark.parametrize("kind", NOT_WHOLE)
def test_parts_that_do_not_cover_it_once_are_refused(kind, tmp_path):
    write(tmp_path, NOT_WHOLE[kind])
    with pytest.raises(DumpError, match=r"the parts of a\.weight do not cover it"):
        read_weights(tmp_path)


@pytest.mark.parametrize("size", [(), (0, 4)])
def test_a_part_of_a_number_or_of_nothing_is_the_whole(size, tmp_path):
    write(tmp_path, [((0,) * len(size), torch.ones(size))], size)
    assert read_weights(tmp_path)["a.weight"].shape == size


def test_a_split_along_too_many_dimensions_is_refused(tmp_path):
    size = (2,) * 20
    parts = [((0,) * 20, torch.ones((1,) * 20)), ((0,) * 20, torch.ones((2,) * 19 + (1,)))]
    write(tmp_path, parts, size)
    with pytest.raises(DumpError, match="do not cover it"):
        read_weights(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "change",
    [lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), torch.Tensor.to_sparse, lambda w: w.to("meta")],
    ids=["quantized", "sparse", "meta"],
)
def test_a_part_without_plain_values_is_refused(change, tmp_path):
    write(tmp_path, [((0, 0), change(W))])
    with pytest.raises(DumpError, match="not a plain tensor"):
        read_weights(tmp_path)


def test_a_pipe_for_a_file_of_parts_is_not_opened(tmp_path):
    write(tmp_path, WHOLE["one"])
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.storage_data = dict.fromkeys(metadata.storage_data, _StorageInfo("__1_0.distcp", 0, 0))
    save_metadata(tmp_path, metadata)
    os.mkfifo(tmp_path / "__1_0.distcp")
    with pytest.raises(DumpError, match="is not in it"):
        read_weights(tmp_path)


def test_metadata_leaves_nothing_on_the_classes_that_stand_in(tmp_path):
    """A pickle may set attributes of what it names: here of torch.Size, by BUILD with a state of slots."""
    write(tmp_path, WHOLE["one"])
    sound = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(b"\x80\x02ctorch\nSize\nN}X\x07\x00\x00\x00__new__Ns\x86b.")
    with pytest.raises(DumpError, match="its metadata is invalid"):
        read_weights(tmp_path)
    (tmp_path / ".metadata").write_bytes(sound)
    assert torch.equal(read_weights(tmp_path)["a.weight"], W)
