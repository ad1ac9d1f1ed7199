"""Weights that were sharded over ranks are joined from the ranks' files, or the error says which file is missing."""

import pytest
import torch

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
