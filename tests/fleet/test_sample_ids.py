"""How a sample is known again in another dump."""

from __future__ import annotations

import numpy as np
import torch

from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.sample_ids import identify_samples


def saved(tmp_path, **more):
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict(), "image": torch.arange(8.0).view(4, 2), **more}, path)
    return read_dump(path)


def texts(dump, *samples):
    return [(found.by, found.text) for found in identify_samples(dump, samples, ["image"])]


def test_names_that_the_batch_carries(tmp_path):
    dump = saved(tmp_path, path=["a.png", "b.png", "c.png", "d.png"])
    assert texts(dump, 3, 1) == [("name", "d.png"), ("name", "b.png")]


def test_indexes_of_the_dataset(tmp_path):
    assert texts(saved(tmp_path, sample_idx=torch.tensor([7, 381, 2, 5])), 1) == [("name", "381")]
    assert texts(saved(tmp_path, index=np.array([7, 381, 2, 5])), 1) == [("name", "381")]


def test_labels_are_no_names(tmp_path):
    dump = saved(tmp_path, label=torch.tensor([3, 1, 0, 2]), kind=["cat", "cat", "dog", "cat"])
    assert [by for by, _ in texts(dump, 1)] == ["content"]


def test_the_same_data_has_the_same_digest(tmp_path):
    first = texts(saved(tmp_path), 2)
    moved = saved(tmp_path, image=torch.arange(8.0).view(4, 2).flip(0))
    assert texts(moved, 1) == first
    assert texts(moved, 2) != first


def test_samples_beyond_the_batch_are_not_known(tmp_path):
    assert texts(saved(tmp_path), 4) == []
