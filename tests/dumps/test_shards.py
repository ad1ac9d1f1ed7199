"""Weights that were sharded over ranks are joined from the ranks' files, or the error says which file is missing."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import placement_types

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

WHOLE = torch.arange(35.0).reshape(7, 5)
ONE_MESH = {"shape": [7, 5], "ranks": [0, 1, 2], "placements": [0]}
ROWS = {0: WHOLE[:3], 1: WHOLE[3:6], 2: WHOLE[6:]}


def write(folder, parts, shard, *, step=4, **more):
    for rank, part in parts.items():
        event = {"step": step, "rank": rank, "world_size": len(parts)}
        state = {"weight": part.clone(), "bias": torch.full((2,), float(rank))}
        contents = {"format": "nandoctor.dump/1", "state_dict": state, "shards": {"weight": shard}, "event": event}
        torch.save({**contents, **more}, folder / f"nan-step{step:06d}-rank{rank}.pth")
    return [folder / f"nan-step{step:06d}-rank{rank}.pth" for rank in parts]


@pytest.mark.parametrize(
    ("shard", "parts"),
    [
        (ONE_MESH, ROWS),
        ({**ONE_MESH, "placements": [1]}, {0: WHOLE[:, :2], 1: WHOLE[:, 2:4], 2: WHOLE[:, 4:]}),
        ({**ONE_MESH, "ranks": [0, 1], "placements": [0]}, {0: WHOLE, 1: WHOLE[:0]}),
        ({**ONE_MESH, "ranks": [[0, 1], [2, 3]], "placements": [None, 0]}, dict(enumerate([WHOLE[:4], WHOLE[4:]] * 2))),
        (
            {**ONE_MESH, "ranks": [[0, 1], [2, 3]], "placements": [0, 1]},
            {0: WHOLE[:4, :3], 1: WHOLE[:4, 3:], 2: WHOLE[4:, :3], 3: WHOLE[4:, 3:]},
        ),
    ],
    ids=["rows", "columns", "an empty part", "copies of rows", "rows and columns"],
)
def test_every_rank_reads_whole_weights(tmp_path, shard, parts):
    for rank, path in enumerate(write(tmp_path, parts, shard)):
        state = read_dump(path).state
        assert torch.equal(state["weight"], WHOLE)
        assert state["bias"].tolist() == [rank, rank]


@pytest.mark.parametrize("size", [0, 1, 5, 7, 8, 13])
@pytest.mark.parametrize(("num_chunks", "num_ranks"), [(1, 2), (2, 2), (3, 2), (2, 4)])
def test_chunks_that_are_split_by_themselves(tmp_path, size, num_chunks, num_ranks):
    whole = torch.arange(size * 2.0).reshape(size, 2)
    strided = placement_types._StridedShard(0, split_factor=num_chunks)
    parts = strided._split_tensor(whole, num_ranks, with_padding=False)[0]
    shard = {"shape": [size, 2], "ranks": list(range(num_ranks)), "placements": [[0, num_chunks]]}
    path = write(tmp_path, dict(enumerate(parts)), shard)[0]
    assert torch.equal(read_dump(path).state["weight"], whole)


def test_copies_need_the_files_of_one_group_alone(tmp_path):
    shard = {**ONE_MESH, "ranks": [[0, 1], [2, 3]], "placements": [None, 0]}
    paths = write(tmp_path, dict(enumerate([WHOLE[:4], WHOLE[4:]] * 2)), shard)
    paths[0].unlink()
    assert torch.equal(read_dump(paths[3]).state["weight"], WHOLE)
    with pytest.raises(DumpError, match=r"file of rank 0 is not beside it") as caught:
        read_dump(paths[1])
    assert "nan-step000004-rank0.pth is missing" in caught.value.remedy


def test_files_of_another_step(tmp_path):
    path = write(tmp_path, ROWS, ONE_MESH)[0]
    write(tmp_path, ROWS, ONE_MESH, step=5)[1].replace(tmp_path / "nan-step000004-rank1.pth")
    with pytest.raises(DumpError, match="of another step"):
        read_dump(path)


def test_a_neighbour_that_is_no_recorders_file(tmp_path):
    path = write(tmp_path, ROWS, ONE_MESH)[0]
    torch.save({"state_dict": {"weight": WHOLE}}, tmp_path / "nan-step000004-rank1.pth")
    with pytest.raises(DumpError, match="not written by the recorder"):
        read_dump(path)


@pytest.mark.parametrize(
    "shard",
    [
        {**ONE_MESH, "placements": ["_StridedShard(dim=0, sf=2)"]},
        {**ONE_MESH, "placements": [7]},
        {**ONE_MESH, "placements": [0, 0]},
        {**ONE_MESH, "shape": [8, 5]},
        {**ONE_MESH, "ranks": 0},
        {**ONE_MESH, "ranks": []},
        {"ranks": [0, 1, 2]},
        "rows",
    ],
    ids=str,
)
def test_parts_that_do_not_make_up_the_weight(tmp_path, shard):
    path = write(tmp_path, ROWS, shard)[0]
    with pytest.raises(DumpError, match=r"parts of weight cannot be joined"):
        read_dump(path)


@pytest.mark.parametrize("mesh", [[0] * 10_000, [0, 1, 2] * 5_000], ids=["one rank", "all ranks"])
def test_a_mesh_that_multiplies_what_is_there(tmp_path, mesh):
    path = write(tmp_path, ROWS, {**ONE_MESH, "ranks": mesh})[0]
    with pytest.raises(DumpError, match="claims more weights than it holds"):
        read_dump(path)


def test_an_expanded_part(tmp_path):
    write(tmp_path, ROWS, ONE_MESH)
    path = tmp_path / "nan-step000004-rank1.pth"
    saved = torch.load(path)
    saved["state_dict"]["weight"] = torch.zeros(1).expand(1 << 40)
    torch.save(saved, path)
    with pytest.raises(DumpError, match="claims more weights than it holds"):
        read_dump(tmp_path / "nan-step000004-rank0.pth")


@pytest.mark.parametrize(
    "mesh",
    [torch.zeros(1, dtype=torch.uint8).expand(1 << 40), [-1], [1 << 20], [[0] * 70_000], "012", {0: 1}, [1.0]],
    ids=["tensor", "negative", "large", "many", "text", "dict", "float"],
)
def test_a_mesh_that_is_no_list_of_ranks(tmp_path, mesh):
    path = write(tmp_path, ROWS, {**ONE_MESH, "ranks": mesh})[0]
    with pytest.raises(DumpError, match="cannot be joined"):
        read_dump(path)


def test_a_random_state_that_claims_more_than_it_holds(tmp_path):
    state = torch.zeros(1, dtype=torch.uint8).expand(1 << 40)
    torch.save({"state_dict": {"weight": WHOLE}, "rng_state": state, "x": WHOLE}, tmp_path / "dump.pth")
    with pytest.raises(DumpError, match="random generator"):
        read_dump(tmp_path / "dump.pth")
