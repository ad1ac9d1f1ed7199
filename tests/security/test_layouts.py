"""Tensors that are no plain block of numbers, at every place of a file: read, or refused in one clear sentence."""

import itertools
import math
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path

import forgery
import mutate
import pytest
import torch

from nandoctor import verify
from nandoctor.case import replay
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.recorded_format import Autocast, Recorded
from nandoctor.dumps.writer import write_dump
from nandoctor.engine.call import recorded_backends
from nandoctor.errors import DumpError, NanDoctorError
from nandoctor.process_wide import RECORDED


def hiding(item):
    """A tensor or mapping with attributes that hide its methods, as a pickle can set them."""
    names = (*("numel", "dim", "item", "detach", "contiguous", "isnan", "float"), *("keys", "values", "get"))
    vars(item).update(dict.fromkeys(names, "text"))
    return item


def all_hiding(tree):
    """The tree with such mappings in place of all dicts."""
    if isinstance(tree, dict):
        return hiding(OrderedDict((key, all_hiding(item)) for key, item in tree.items()))
    return type(tree)(map(all_hiding, tree)) if isinstance(tree, (list, tuple)) else tree


KINDS = {
    "COO": torch.Tensor.to_sparse,
    "CSR": torch.Tensor.to_sparse_csr,
    "CSC": torch.Tensor.to_sparse_csc,
    "BSR": lambda t: t.to_sparse_bsr((1, 1)),
    "BSC": lambda t: t.to_sparse_bsc((1, 1)),
    "of no dimension": lambda _: torch.tensor(1.0).to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "masked": lambda t: torch.masked.masked_tensor(t, t > 0.5),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "quantized by channel": lambda t: torch.quantize_per_channel(
        t.float(), torch.ones(len(t)), torch.zeros(len(t)).long(), 0, torch.quint8
    ),
    "meta": lambda t: t.to("meta"),
    "fp8": lambda t: t.to(torch.float8_e4m3fn),
    "bare exponents": lambda t: t.to(torch.float8_e8m0fnu),
    "bits": lambda t: torch.empty(t.shape, dtype=torch.bits8),
    "complex32": lambda t: t.to(torch.complex32),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "integers": lambda t: t.to(torch.int32),
    "unsigned": lambda t: t.to(torch.uint16),
    "flags": lambda t: t.bool(),
    "with attributes in place of methods": lambda t: hiding(t.clone()),
}
REPLAYED = (("logit",), ("output", 0), ("state_dict", "linear.weight"), ("optimizer", "state", 0, "exp_avg"))


def files_with(kind, places):
    """A file for each place that one of the two formats has, with a tensor of that kind at it."""
    for make, place in itertools.product((mutate.plain, mutate.recorded), places):

        def put(container, key):
            container[key] = KINDS[kind](torch.as_tensor(container[key]))

        # RuntimeError, ValueError: no such tensor of this shape
        with suppress(RuntimeError, ValueError, TypeError, KeyError, IndexError):
            torch.save(mutate.changed(make(), place, put), "case.pth")
            yield place


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(forgery.make_project(tmp_path))


class Claims:
    """A tensor that another shape is claimed of, larger than its storage."""

    def __init__(self, tensor, shape):
        self._arguments = tensor._typed_storage(), 0, shape, (shape[1], 1), False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self._arguments


class Lies:
    """A sparse tensor with an element outside of it."""

    def __init__(self, layout, *data):
        self._arguments = layout, data

    def __reduce__(self):
        return torch._utils._rebuild_sparse_tensor, self._arguments


BEYOND, HERE = torch.tensor([1 << 40]), torch.tensor([0])
LARGER = {
    "COO": lambda: Lies(torch.sparse_coo, BEYOND[None], torch.ones(1), (3,), False),
    "COO, negative": lambda: Lies(torch.sparse_coo, -BEYOND[None], torch.ones(1), (3,)),
    "CSR rows": lambda: Lies(torch.sparse_csr, torch.tensor([0, 1 << 40]), HERE, torch.ones(1), (1, 3)),
    **{f"{number} numbers": lambda number=number: Claims(torch.zeros(number), (5000, 3)) for number in (1, 3, 4, 64)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [("x",), ("state_dict", "linear.bias"), ("nested", "values", 0)])
@pytest.mark.parametrize("kind", LARGER)
def test_a_tensor_that_reaches_beyond_its_data_is_refused(kind, place):
    """Torch grows a storage to what a tensor claims, and checks no index of a sparse one: kernels crash on it."""
    torch.save(
        mutate.changed(mutate.plain(), place, lambda container, key: container.__setitem__(key, LARGER[kind]())),
        "case.pth",
    )
    with pytest.raises(DumpError, match="cannot be rebuilt"):
        read_dump("case.pth")


@pytest.mark.parametrize("make", [mutate.plain, mutate.recorded])
def test_attributes_of_mappings_hide_no_methods(make):
    torch.save(make(), "plain.pth")
    torch.save({key: all_hiding(item) for key, item in make().items()}, "hiding.pth")
    told = [summarize(read_dump(name)) for name in ("plain.pth", "hiding.pth")]
    assert [item.name for item in told[0].arrays] == [item.name for item in told[1].arrays]
    assert told[0].num_parameters == told[1].num_parameters > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["COO", "CSR", "quantized", "meta", "fp8", "integers"])
def test_an_odd_tensor_is_replayed_or_refused(kind):
    for place in files_with(kind, REPLAYED):
        with suppress(NanDoctorError):
            reproduction = replay("case.pth", mutate.Net(), fixes=False).report.reproduction
            assert kind == "fp8" or place[0] != "logit" or reproduction.grade != "exact"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["COO", "CSR", "fp8", "unsigned", "flags"])
def test_an_odd_array_of_a_sound_step_is_no_error(kind):
    state, x = mutate.Net().state_dict(), torch.ones(2, 3)
    torch.save({"state_dict": state, "x": x, "logit": KINDS[kind](x * math.nan)}, "case.pth")
    report = replay("case.pth", mutate.Net(), fixes=False).report
    assert report.reproduction.grade == ("finite" if kind == "fp8" else "no-reference")
    torch.save({"state_dict": state, "x": KINDS[kind](x)}, "case.pth")
    with suppress(NanDoctorError):
        assert verify("case.pth", mutate.Net()).outcome in ("passes", "cannot-tell")


@pytest.mark.filterwarnings("ignore")
def test_what_no_file_can_hold_is_left_out_of_a_record(tmp_path):
    x = torch.rand(3, 3)
    odd = {"bits": KINDS["bits"](x), "meta": x.to("meta")}
    step = forgery.contents(Path.cwd(), batch={"x": x, "mkldnn": (2 * x).to_mkldnn(), "csr": x.to_sparse_csr(), **odd})
    dump = read_dump(write_dump(step, tmp_path, "nan-step1"))
    assert {"batch.x", "batch.mkldnn", "batch.csr"} <= dump.arrays.keys()
    assert len(dump.missing) == len(odd)


@pytest.mark.parametrize("value", ["\x1b[2J", 1.5, Counter("aab"), None, -1, 10**6, torch.ones(2), {}], ids=range(8))
def test_an_odd_switch_is_left_as_it_is(value):
    """Of some torch would warn, in words of the file that no terminal may get."""
    cpu = Autocast(enabled=False, device="cpu", dtype="float16")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    recorded = Recorded(autocast=cpu, backends=dict.fromkeys(RECORDED, value))
    with recorded_backends(recorded, torch.device("cpu")):
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nested", "'x' is a nested tensor, which is not read"),
        ("quantized", "'x' is a quantized tensor, which is not read"),
        ("meta", "'x' is a tensor on the meta device, without values, which is not read"),
        ("bits", "'x' is a tensor of torch.bits8, which is not read"),
        ("conjugated", "'x' is a tensor whose conjugation or sign was put off, which is not read"),
    ],
)
def test_an_honest_tensor_is_refused_as_what_it_is(kind, message, tmp_path):
    torch.save({"state_dict": {}, "x": KINDS[kind](torch.ones(2, 2))}, tmp_path / "case.pth")
    with pytest.raises(DumpError, match=message):
        read_dump(tmp_path / "case.pth")
