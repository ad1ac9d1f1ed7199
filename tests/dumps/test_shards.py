"""Weights that were sharded over ranks are joined from the ranks' files, or the error says which file is missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import placement_types

from nandoctor.capture import sharding
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

WHOLE = torch.arange(35.0).reshape(7, 5)
ROWS = [((0, 0), WHOLE[:3]), ((3, 0), WHOLE[3:6]), ((6, 0), WHOLE[6:])]


def write(folder, parts, *, shape=(7, 5), step=4, **more):
    """The files of all ranks, each with a part of the weight and its place."""
    paths = []
    for rank, (offset, part) in enumerate(parts):
        contents = {
            "format": "nandoctor.dump/1",
            "state_dict": {"weight": part.clone(), "bias": torch.full((2,), float(rank))},
            "shards": {"weight": {"shape": list(shape), "offset": offset}},
            "event": {"step": step, "rank": rank, "world_size": len(parts)},
        }
        paths.append(folder / f"nan-step{step:06d}-rank{rank}.pth")
        torch.save({**contents, **more}, paths[-1])
    return paths


HALVES = [((0, 0), WHOLE[:4]), ((4, 0), WHOLE[4:])]
PARTS = {
    "rows": ROWS,
    "columns": [((0, 0), WHOLE[:, :2]), ((0, 2), WHOLE[:, 2:4]), ((0, 4), WHOLE[:, 4:])],
    "an empty part": [((0, 0), WHOLE), ((7, 0), WHOLE[:0])],
    "copies of rows": HALVES * 2,
    "rows and columns": [
        ((0, 0), WHOLE[:4, :3]),
        ((0, 3), WHOLE[:4, 3:]),
        ((4, 0), WHOLE[4:, :3]),
        ((4, 3), WHOLE[4:, 3:]),
    ],
}


@pytest.mark.parametrize("kind", PARTS)
def test_every_rank_reads_whole_weights(tmp_path, kind):
    for rank, path in enumerate(write(tmp_path, PARTS[kind])):
        state = read_dump(path).state
        assert torch.equal(state["weight"], WHOLE)
        assert state["bias"].tolist() == [rank, rank]


def test_what_is_split_twice_along_rows_cannot_be_joined():
    placements = [placement_types._StridedShard(0, split_factor=2), placement_types.Shard(0)]
    sharded = SimpleNamespace(shape=torch.Size((12, 5)), placements=placements)
    assert sharding._describe(sharded) == {"shape": [12, 5], "offset": []}


def test_copies_need_the_files_of_one_group_alone(tmp_path):
    paths = write(tmp_path, HALVES * 2)
    paths[0].unlink()
    assert torch.equal(read_dump(paths[3]).state["weight"], WHOLE)
    paths[2].unlink()
    with pytest.raises(DumpError, match="have not all of weight") as caught:
        read_dump(paths[3])
    assert "all ranks of one step into one folder" in caught.value.remedy


def test_files_of_another_step(tmp_path):
    path = write(tmp_path, ROWS)[0]
    write(tmp_path, ROWS, step=5)[1].replace(tmp_path / "nan-step000004-rank1.pth")
    with pytest.raises(DumpError, match="of another step"):
        read_dump(path)


def test_a_neighbour_that_is_no_recorders_file(tmp_path):
    path = write(tmp_path, ROWS)[0]
    torch.save({"state_dict": {"weight": WHOLE}}, tmp_path / "nan-step000004-rank1.pth")
    with pytest.raises(DumpError, match="not written by the recorder"):
        read_dump(path)


@pytest.mark.parametrize(
    ("shape", "offset", "said"),
    [
        ((8, 5), (0, 0), "have not all of weight"),
        ((5, 7), (0, 0), "cannot be joined"),
        ((7, 5), (-1, 0), "cannot be joined"),
        ((7, 5), (0,), "cannot be joined"),
        ((7, 5), (), "cannot be joined"),
        ((7, 5), (1 << 62, 0), "cannot be joined"),
        ((-7, -5), (0, 0), "cannot be joined"),
        ((7, 5), "00", "shards"),
        ((7, 5), (0.5, 0), "shards"),
        (torch.zeros(1).expand(1 << 40), (0, 0), "shards"),
    ],
    ids=str,
)
def test_parts_that_do_not_make_up_the_weight(tmp_path, shape, offset, said):
    (path,) = write(tmp_path, [(offset, WHOLE)])
    saved = torch.load(path)
    saved["shards"]["weight"]["shape"] = shape
    torch.save(saved, path)
    with pytest.raises(DumpError, match=said):
        read_dump(path)


def test_an_expanded_part(tmp_path):
    write(tmp_path, ROWS)
    path = tmp_path / "nan-step000004-rank1.pth"
    saved = torch.load(path)
    saved["state_dict"]["weight"] = torch.zeros(1).expand(1 << 40)
    torch.save(saved, path)
    with pytest.raises(DumpError, match="claims more weights than it holds"):
        read_dump(tmp_path / "nan-step000004-rank0.pth")


def test_a_random_state_that_claims_more_than_it_holds(tmp_path):
    state = torch.zeros(1, dtype=torch.uint8).expand(1 << 40)
    torch.save({"state_dict": {"weight": WHOLE}, "rng_state": state, "x": WHOLE}, tmp_path / "dump.pth")
    with pytest.raises(DumpError, match="random generator"):
        read_dump(tmp_path / "dump.pth")
