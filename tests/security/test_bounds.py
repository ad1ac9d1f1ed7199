"""Files of a few kilobytes that ask for hours or gigabytes: each is refused soon, and a few are examined as mutants."""

import os
import resource
import time
from pathlib import Path

import forge
import mutate
import pytest
import torch
from forgery import contents, make_project

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError
from nandoctor.fleet.triage import Store
from nandoctor.source_files import parse_source
from nandoctor.step.settings import Settings

MODULUS = (1 << 61) - 1  # what Python's hash of an integer is taken by


def recorded(folder, **changes):
    return forge.saved(contents(folder, **changes))


def allocation(module, name):
    return b"}(" + forge.text("x") + forge.name(module, name) + forge.integer(1 << 33) + b"\x85Ru"


def colliding(after):
    return b"".join(forge.integer(number * MODULUS) + after for number in range(1, 20_000))


def big_lists(f):
    """A list under many names, each of which goes into the names of its items."""
    return recorded(f, batch={"x" * 100_000: [torch.zeros(1) for _ in range(300)]})


CALL = {"names": ["x"], "args": (torch.ones(1, 3),), "kwargs": {}}
BOMBS = {
    "keys of one hash": (lambda f: forge.archive(b"}(" + colliding(b"N") + b"u"), "more than 64 bits as a key"),
    "tuples of one hash": (lambda f: forge.archive(b"}(" + colliding(b"\x85N") + b"u"), "thousands of keys"),
    "a storage without a file": (lambda f: forge.archive(allocation("torch.storage", "UntypedStorage")), "TypeError"),
    "an integer of 10,000 digits": (lambda f: forge.saved({"a": 10**500}), "integer of 1,661 bits"),
    "thousands of calls": (lambda f: recorded(f, calls=[CALL] * 5000), "5,000 calls of the model"),
    "millions of instructions": (lambda f: forge.archive(b"N" * 2_000_000), "more than 2,000,000 instructions"),
    "long names of many": (big_lists, "neither a short string nor a number"),
    "a directory of millions": (
        lambda f: forge.archive(b"}")[:-10] + (1 << 31).to_bytes(4, "little") + bytes(6),
        "zip directory claims 2,147,483,648 bytes",
    ),
    "a tensor of 65 dimensions": (lambda f: recorded(f, batch=torch.ones((1,) * 65)), "maximum supported dimension"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "millions of instructions")) for kind in BOMBS],
    ids=list(BOMBS),
)
def test_a_bomb_is_refused_soon(kind, tmp_path):
    make, message = BOMBS[kind]
    project = make_project(tmp_path)
    (project / "dump.pth").write_bytes(make(project))
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DumpError, match=message) as caught:
        read_dump(project / "dump.pth")
    assert str(caught.value).replace("\n", "").isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
    assert time.process_time() - started < 30


def test_overlapping_members_are_refused(tmp_path):
    data = bytearray(forge.saved({"weight": torch.zeros(64), "other": torch.ones(64)}))
    first, second = (
        data.index(b"PK\x01\x02", data.index(name, len(data) // 2) - 46) for name in (b"data/0", b"data/1")
    )
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    (tmp_path / "dump.pth").write_bytes(data)
    with pytest.raises(DumpError, match="not where its zip directory says"):
        read_dump(tmp_path / "dump.pth")


def test_a_triage_reads_nothing_of_an_endless_file_to_tell_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    for endless in (tmp_path / "pipe.pth", Path("/dev/zero")):
        with pytest.raises(OSError, match="a device or a pipe"):
            Store(tmp_path).key_of(endless, Settings())
        assert parse_source(endless) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "structures"])
def test_a_sample_of_mutants_does_no_harm(kind, capsys):
    """`python tests/security/mutate.py --bytes 10000 --structures 5000` runs them all."""
    assert mutate.run(kind, 30, first=20000) == []
    assert f"{kind}: 30 of 30, 0 wrong" in capsys.readouterr().out
