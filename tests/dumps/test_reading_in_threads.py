"""Dumps are read beside other reads, and beside a training loop's own torch.load, without either noticing."""

from __future__ import annotations

import ipaddress
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

NUMPY = [np.ndarray, np.dtype, np.dtypes.Float32DType, np._core.multiarray._reconstruct]


@pytest.fixture
def dump(tmp_path):
    """A dump whose arrays are numpy's, which are read through stand-ins."""
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": np.arange(3, dtype=np.float32)}, path)
    return path


@pytest.fixture
def allowed():
    with torch.serialization.safe_globals([ipaddress.IPv4Address, *NUMPY]):
        yield


def test_two_threads_that_read_lose_none_of_torchs_globals(dump, allowed):
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        dumps = list(pool.map(lambda _: read_dump(dump), range(40)))
    assert set(torch.serialization.get_safe_globals()) == before
    assert all(read.arrays["x"].tolist() == [0, 1, 2] for read in dumps)


def test_a_loop_and_a_reader_run_side_by_side(dump, tmp_path, allowed):
    """The loop has a class and an array in its files that only its own list lets torch.load make."""
    own = tmp_path / "own.pth"
    torch.save({"host": ipaddress.IPv4Address("10.0.0.1"), "table": np.arange(2, dtype=np.float32)}, own)
    stop = threading.Event()
    problems = []

    def loop():
        while not stop.is_set():
            try:
                loaded = torch.load(own)
                if loaded["host"] != ipaddress.IPv4Address("10.0.0.1") or type(loaded["table"]) is not np.ndarray:
                    problems.append("another type")
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        read_dump(dump)
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_what_a_process_allows_is_not_allowed_to_a_dump(tmp_path, allowed):
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": ipaddress.IPv4Address("10.0.0.1")}, path)
    with pytest.raises(DumpError, match=r"ipaddress\.IPv4Address"):
        read_dump(path)
