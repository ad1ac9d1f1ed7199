"""Reads and replays thousands of mutated dumps, and counts what must not happen: 0 of each is the aim.

    python tests/security/mutate.py --bytes 10000 --structures 5000

A case ends in a result or in a `NanDoctorError`. Anything else that is raised counts as a traceback; more than 30 s as
a hang; more than 1 GB as memory; a line that the project's code wrote, for a file that was not the user's own, as a
canary. Each case can be made again by its kind and number.
"""

import argparse
import collections
import copy
import faulthandler
import io
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a process of its own it has only its own folder

import forgery
import numpy as np
import torch
from torch import nn
from wording import plain_text

from nandoctor.case import replay
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import NanDoctorError
from nandoctor.views.html import card_of
from nandoctor.views.inspect_dump import inspection_document
from nandoctor.views.report import report_document

MAX_SECONDS, MAX_NBYTES = 30, 1 << 30
BATCH = 500


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)


def plain():
    step = forgery.contents(Path.cwd())
    return {
        "state_dict": step["state_dict"],
        "x": step["calls"][0]["args"][0],
        "y": step["batch"]["y"].numpy(),
        "logit": step["output"],
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
        "rng_state": torch.get_rng_state(),
        "optimizer": optimizer(),
        "epoch": 3,
        "nested": {"values": [1, 2.5, "text", None, (torch.zeros(1), {7})]},
    }


def optimizer():
    slots = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.full((3,), 1e-12)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0, 1]}]
    return {"state": {0: slots, 1: dict(slots)}, "param_groups": groups}


def recorded():
    step = forgery.contents(Path.cwd())
    step["calls"].append({**step["calls"][0], "rng": {"torch": torch.get_rng_state()}})
    _, keys, *_ = np.random.get_state()
    numpy_state = {"keys": torch.from_numpy(keys.astype("int64")), "position": 3, "has_gauss": 0}
    step["rng"] |= {"numpy": {**numpy_state, "cached_gaussian": 0.0}}
    step["output"] = [step["output"], step["output"].clone()]
    backends = {"num_threads": 1, "cuda_matmul_tf32": True}
    (group,), (slots, _) = optimizer()["param_groups"], optimizer()["state"].values()
    groups, state = [{**group, "params": ["linear.weight"]}], {"linear.weight": slots}
    updater = {"module": "torch.optim.adam", "name": "Adam", "file": "", "groups": groups, "state": state}
    return {**step, "updater": updater, "watched": ["linear"], "backends": backends}


def odd_values():
    """What no training writes, and a few things that some do."""
    cycle = []
    cycle.append(cycle)
    deep = torch.zeros(1)
    for _ in range(60):
        deep = [deep]
    x = torch.rand(3, 3)
    return [
        *(None, True, -1, 0, 10**300, -(10**400), 2**63, float("nan"), float("inf"), 1j, b"bytes", "", "x" * 300),
        *("\x1b[2J\u202e\x00", "\ud800", "../../etc/passwd", "/dev/zero", "os", "train.py", "execute", "__class__"),
        *([], (), {}, set(), [[]], [1] * 5000, {"a": 1}, {1: 2}, {(1, 2): 3}, {None: 1}, cycle, deep),
        *(torch.zeros(0), torch.zeros(()), torch.zeros(4, 3), torch.zeros(3, 4), torch.zeros(1, 1, 1, 1, 1, 3)),
        *(torch.zeros(1).expand(1 << 20), torch.zeros(1).expand(1 << 30), torch.zeros(3, 3, device="meta")),
        *(x.half(), x.bfloat16(), x.double(), x.to(torch.complex64), x.to(torch.complex32), x.bool(), x.long()),
        *(x.to(torch.uint8), x.to(torch.uint16), x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)),
        *(x.to_sparse(), x.to_sparse_csr(), x.to_mkldnn().to_dense(), x.T, x.conj(), nn.Parameter(x)),
        *(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), torch.zeros(3, 3, dtype=torch.int32).view(torch.float32)),
        *(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.empty(3, dtype=torch.uint4)),
        *(torch.empty(3, dtype=torch.bits8), torch.full((3, 3), float("nan")), torch.get_rng_state()[:100]),
        *(torch.randint(0, 255, (5056,), dtype=torch.uint8), torch.full((624,), 2**40), torch.full((625,), -1)),
        *(np.zeros(3), np.float32(2), np.array(["a"]), np.array([None]), np.zeros(3, "M8[s]"), np.zeros(2, ">c16")),
        *(torch.float16, torch.device("cuda"), torch.device("meta"), torch.Size([1, 2]), torch.per_tensor_affine),
        *(collections.OrderedDict(a=1), collections.Counter("aab"), torch.nn.Linear(2, 2).state_dict()),
        *(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.optim.Adam([nn.Parameter(x.clone())])),
    ]


def places(tree, path=()):
    """Every place of a tree of dicts, lists and tuples, as a path."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(tree, path, change):
    """The tree with `change(container, key)` applied to the container of a place."""
    key, *rest = path
    is_tuple = isinstance(tree, tuple)
    tree = list(tree) if is_tuple else copy.copy(tree)
    if rest:
        tree[key] = changed(tree[key], rest, change)
    else:
        change(tree, key)
    return tuple(tree) if is_tuple else tree


def mutate_structure(rng):
    tree = rng.choice((plain, recorded))()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.choice(list(places(tree))), rng.choice(list(places(tree)))
        value = rng.choice(odd_values())

        def delete(container, key):
            del container[key]

        def put(container, key, value=value):
            container[key] = value

        def rename(container, key, value=value):
            if isinstance(container, dict) and not isinstance(value, (list, dict, set)):
                container[value] = container.pop(key)

        def move(container, key, other=other, tree=tree):
            for part in other:
                tree = tree[part]
            container[key] = tree

        tree = changed(tree, at, rng.choice((delete, put, put, put, rename, move)))
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def mutate_bytes(rng, originals):
    original = rng.choice(originals)
    data = bytearray(original)
    # Half of the changes go where the pickle and the directory lie, for most of a file is numbers.
    spans = [(0, len(data)), (0, len(data)), (0, min(len(data), 3000)), (max(len(data) - 2000, 0), len(data))]
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        start = rng.randrange(*rng.choice(spans)) % max(len(data), 1)
        length = rng.choice((1, 2, 4, 16, 200))
        change = rng.choice(("set", "flip", "flip", "delete", "repeat", "insert", "cut", "zero"))
        if change in ("set", "flip"):
            data[start : start + 1] = bytes(
                [rng.randrange(256) if change == "set" else data[start] ^ 1 << rng.randrange(8)]
            )
        elif change == "delete":
            del data[start : start + length]
        elif change == "repeat":
            data[start:start] = data[start : start + length] * rng.choice((1, 1, 100))
        elif change == "insert":
            data[start:start] = rng.choice(
                (b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"R", b"h\x01", b"(t", b"PK\x05\x06")
            )
        elif change == "zero":
            data[start : start + length] = bytes(len(data[start : start + length]))
        elif rng.random() < 0.2:
            del data[start:]
        if not data:
            return b"P"
    return bytes(data)


def mutate_pickle(rng, original):
    """A zip archive whose pickle is changed, and whose checksums fit."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(original)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, mutate_bytes(rng, [data]) if name.endswith("data.pkl") else data)
    return buffer.getvalue()


def unchecked(original):
    """The archive without checksums, by which any change would be refused at once."""
    data = bytearray(original)
    entry = data.find(b"PK\1\2")
    while entry >= 0:
        data[entry + 16 : entry + 20] = bytes(4)
        entry = data.find(b"PK\1\2", entry + 4)
    return bytes(data)


def originals():
    """Files of both layouts, one of them signed, in the working directory."""
    torch.save(plain(), "plain.pth")
    torch.save(recorded(), "recorded.pth")
    write_dump(recorded(), Path.cwd(), "signed")
    return [Path(name).read_bytes() for name in ("plain.pth", "recorded.pth", "signed.pth")]


def make(kind, number, files):
    rng = random.Random(f"{kind} {number}")
    if kind == "structures":
        return mutate_structure(rng)
    if rng.random() < 0.5:
        return mutate_pickle(rng, rng.choice(files))
    return mutate_bytes(rng, [unchecked(file) for file in files])


def examine(path):
    """All that a user would do with a file from somebody else; raises what the user would see."""
    plain_text(inspection_document(summarize(read_dump(path, as_torch=False))))
    dump = read_dump(path)
    try:
        if not dump.provenance.own:
            with suppress(NanDoctorError):
                replay(dump, fixes=False)
        case = replay(dump, Net(), fixes=False)
        plain_text(report_document(case.report))
        card_of(report_document(case.report))
    finally:
        if not dump.provenance.own and Path("canary").exists():
            print(f"WRONG: canary {Path('canary').read_text()!r}", flush=True)


def run_batch(kind, first, count):
    """Examine some cases in this process, and print a line for each that went wrong and one for all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    files, path, outcomes = originals(), Path("case.pth"), collections.Counter()
    for number in range(first, first + count):
        try:
            data = make(kind, number, files)
        except Exception:  # what torch.save refuses to write is no file
            outcomes["not writable"] += 1
            continue
        path.write_bytes(data)
        Path("canary").unlink(missing_ok=True)
        print(f"case {kind} {number}", flush=True)
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        try:
            examine(path)
            outcomes["fine"] += 1
        except NanDoctorError as error:
            outcomes["refused"] += 1
            if not str(error).replace("\n", "").isprintable():
                print(f"WRONG {kind} {number}: unprintable: {error!r}")
        except Exception:
            print(f"WRONG {kind} {number}: traceback\n{traceback.format_exc()}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        seconds, grown = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown * 1024 > MAX_NBYTES:
            print(f"WRONG {kind} {number}: memory, {grown >> 10} MB more", flush=True)
        if seconds > MAX_SECONDS:
            print(f"WRONG {kind} {number}: hang, {seconds:.0f} s", flush=True)
    print("OUTCOMES", dict(outcomes), flush=True)


def run(kind, number, *, first=0):
    """Run all cases of a kind, a batch in a process of its own; gives what went wrong."""
    wrong, outcomes = [], collections.Counter()
    for start in range(first, first + number, BATCH):
        count = min(BATCH, first + number - start)
        with tempfile.TemporaryDirectory() as folder:
            forgery.make_project(Path(folder))
            done = subprocess.run(
                [sys.executable, __file__, "--batch", kind, str(start), str(count)],
                cwd=folder,
                env={**os.environ, "NANDOCTOR_CONFIG_DIR": f"{folder}/config"},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        lines = done.stdout.split("\ncase ")
        wrong += [line[line.index("WRONG") :] for line in lines if "WRONG" in line]
        if "OUTCOMES" in done.stdout:
            outcomes.update(eval(done.stdout.rpartition("OUTCOMES ")[2], {}))  # our own process printed it
        else:
            wrong.append(f"WRONG: the process ended at {lines[-1]!r}\n{done.stderr[-3000:]}")
        print(f"{kind}: {start + count - first} of {number}, {len(wrong)} wrong, {dict(outcomes)}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--structures", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batch", nargs=3, metavar=("KIND", "FIRST", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.batch:
        run_batch(given.batch[0], int(given.batch[1]), int(given.batch[2]))
        return
    wrong = [case for kind in ("bytes", "structures") for case in run(kind, getattr(given, kind), first=given.first)]
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
