"""Dumps are read beside other reads, and beside a training loop's own torch.load, without either noticing."""

from __future__ import annotations

import fractions
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from nandoctor.dumps import unpickle
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
def own(tmp_path):
    """A file of the training loop's own, with a class and an array that only its own list lets torch.load make."""
    path = tmp_path / "own.pth"
    torch.save({"ratio": fractions.Fraction(1, 3), "table": np.arange(2, dtype=np.float32)}, path)
    return path


@pytest.fixture
def allowed():
    with torch.serialization.safe_globals([fractions.Fraction, *NUMPY]):
        yield


def is_own(loaded):
    return loaded["ratio"] == fractions.Fraction(1, 3) and type(loaded["table"]) is np.ndarray


def test_two_threads_that_read_lose_none_of_torchs_globals(dump, allowed):
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        dumps = list(pool.map(lambda _: read_dump(dump), range(40)))
    assert set(torch.serialization.get_safe_globals()) == before
    assert all(read.arrays["x"].tolist() == [0, 1, 2] for read in dumps)


def while_a_dump_is_read(action):
    """What `action` returns in another thread while this one is in the middle of torch.load."""
    with unpickle._only_stand_ins(), ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(timeout=300)


def test_a_training_loops_own_files_load_meanwhile(own, allowed):
    assert is_own(while_a_dump_is_read(lambda: torch.load(own)))


def test_what_another_thread_allows_meanwhile_stays_allowed(own):
    def allow_and_load():
        torch.serialization.add_safe_globals([fractions.Fraction, *NUMPY])
        return torch.load(own)

    try:
        assert is_own(while_a_dump_is_read(allow_and_load))
        assert is_own(torch.load(own))
    finally:
        torch.serialization.clear_safe_globals()


def test_another_thread_is_refused_numpy_as_ever(dump):
    def load():
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(dump)
        return True

    assert while_a_dump_is_read(load)


def test_a_loop_and_a_reader_run_side_by_side(dump, own, allowed):
    stop = threading.Event()
    problems = []

    def loop():
        while not stop.is_set():
            try:
                if not is_own(torch.load(own)):
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
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": fractions.Fraction(1, 3)}, path)
    with pytest.raises(DumpError, match=r"fractions\.Fraction"):
        read_dump(path)
    with unpickle._only_stand_ins(), pytest.raises(Exception, match="Weights only load failed"):
        torch.load(path)


def test_a_read_that_fails_ends_like_any_other(tmp_path):
    path = tmp_path / "dump.pth"
    path.write_bytes(b"PK\x03\x04 and nothing after it")
    with pytest.raises(DumpError):
        read_dump(path)
    assert not unpickle._reading.under_way
    assert not unpickle._allowed_by_thread.held
