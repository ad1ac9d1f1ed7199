"""Writing a dump: names that are free, storages of the right size, one copy of what is the same."""

import pytest
import torch

from nandoctor.dumps.file_type import open_container
from nandoctor.dumps.packing import fill, pack
from nandoctor.dumps.tensors import to_torch
from nandoctor.dumps.trees import Slot, name_tensors
from nandoctor.dumps.unpickle import load_pickle
from nandoctor.dumps.writer import write_dump


def write(tmp_path, **contents):
    path = write_dump(contents, tmp_path, "dump")
    return path, torch.load(path, weights_only=True)


def test_a_name_that_is_taken_is_not_taken_again(tmp_path):
    names = [write(tmp_path, number=number)[0].name for number in range(3)]
    assert names == ["dump.pth", "dump-2.pth", "dump-3.pth"]
    assert torch.load(tmp_path / "dump.pth")["number"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_view_does_not_bring_its_whole_storage(tmp_path):
    path, saved = write(tmp_path, view=torch.zeros(1000, 1000)[3, :5], wide=torch.ones(1).expand(2000))
    assert path.stat().st_size < 20_000
    assert (saved["view"].tolist(), saved["wide"].sum()) == ([0.0] * 5, 2000)


def test_what_is_the_same_is_kept_once(tmp_path):
    tensor = torch.arange(10_000.0)
    path, saved = write(tmp_path, state={"a": tensor, "tied": tensor}, batch=[tensor.clone()], calls=({"x": tensor},))
    assert path.stat().st_size < 50_000
    pointers = {saved["state"]["a"].data_ptr(), saved["batch"][0].data_ptr(), saved["calls"][0]["x"].data_ptr()}
    assert len(pointers) == 1


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(AttributeError):
        write_dump({"function": lambda: None}, tmp_path, "dump")
    assert list(tmp_path.iterdir()) == []


def test_trees_come_back_as_they_went_in(tmp_path):
    tensor = torch.ones(2, requires_grad=True)
    value = {"a": [tensor, 1, None], "b": (torch.float16, torch.device("cuda:1")), 3: {"c": "text"}}
    packed = pack(value, "batch")
    assert packed.notes == ()
    assert not packed.tree["a"][0].requires_grad
    arrays = {}

    def take(name, found):
        arrays[name] = to_torch(found)
        return name

    read = load_pickle(open_container(write_dump({"batch": packed.tree}, tmp_path, "dump")))
    tree = name_tensors(read["batch"], "batch", take)
    assert tree["a"][0] == Slot(name="batch.a.0")
    filled = fill(tree, arrays, torch.device("cpu"))
    assert filled["b"] == (torch.float16, torch.device("cpu"))
    assert torch.equal(filled["a"][0], tensor)
    assert filled[3] == {"c": "text"}


def test_a_tree_knows_when_it_was_overwritten():
    tensor = torch.ones(2)
    packed = pack([tensor], "input")
    assert not packed.overwritten
    tensor.add_(1)
    assert packed.overwritten
