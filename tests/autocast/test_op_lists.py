"""CUDA's autocast lists: the tables against torch's header, and every entry of torch's own test lists on this CPU."""

import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nandoctor.autocast.kernels import LISTS, is_listed
from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy, cuda_autocast
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.torch_compat import TORCH

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def macro_entries(macro):
    """The op names of a macro list, with overloads as `aten` writes them."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text()).group(1)
    return [".".join(entry.replace(" ", "").split(",")) for entry in re.findall(r"_\((\w+(?:, \w+)?)\)", body)]


@pytest.mark.parametrize("name", ["lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote"])
def test_list_equals_the_header(name):
    listed = LISTS[name.removesuffix("_fp")]
    assert {op for op in listed if is_listed(op, TORCH)} == set(macro_entries(f"AT_FORALL_{name.upper()}"))


def test_a_run_follows_the_lists_of_the_version_that_is_named():
    """rms_norm is computed in fp32 as a whole since torch 2.12; before, only its power and its root were."""
    half = torch.full((2, 4), 300.0, dtype=torch.float16)
    dtypes = {}
    for version in ((2, 11), (2, 12)):
        with apply_policy(Policy(name="cuda", format=FP16, torch=version), torch.device("cpu")):
            dtypes[version] = torch.nn.functional.rms_norm(half, (4,)).dtype
    assert dtypes[2, 12] is torch.float32
    assert dtypes[2, 11] is torch.float16
    assert not is_listed("rms_norm", (2, 11))


def registered(key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def test_tables_equal_what_this_torch_registers_for_cuda():
    """The header's macros, and what autocast_mode.cpp and AutocastRNN.cpp add by hand."""
    only_on_cuda = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "miopen_rnn"}
    torchs = "lower_precision fp32 fp32_set_opt_dtype fp32_append_dtype promote banned".split()
    ours = {op for name in torchs for op in LISTS[name] if is_listed(op, TORCH)}
    assert registered("AutocastCUDA") - only_on_cuda - {*LISTS["fp32_by_hand"]} == ours


def test_ops_of_the_cpu_list_alone_fall_through():
    ours = {*LISTS["half_on_cuda_alone"], *LISTS["rounded_once_on_cuda"]}
    extra = registered("AutocastCPU") - registered("AutocastCUDA") - ours
    assert "quantile" in extra
    half = torch.rand(4, 4, dtype=torch.float16)
    with cuda_autocast():
        for name in extra:
            dump = torch._C._dispatch_dump(f"aten::{name}")
            assert re.search(r"^AutocastCPU: .*\[ fallthrough boxed \]$", dump, re.MULTILINE), name
        assert torch.trace(half).dtype is torch.float16
        assert torch.nn.functional.pad(half[None], (1, 1), mode="reflect").dtype is torch.float16
        promoted = torch.cat([half, half.float()])
        assert promoted.dtype is torch.float32


def load_test_lists():
    """Torch's own lists of ops and arguments, without the test tools that their module imports and does not use."""
    tools = SimpleNamespace(TEST_WITH_ROCM=False, TestCase=object)
    with mock.patch.dict(sys.modules, {"torch.testing._internal.common_utils": tools}):
        module = import_module("torch.testing._internal.autocast_test_lists")
    rng = torch.get_rng_state()
    torch.manual_seed(0)
    lists = module.AutocastTestLists(torch.device("cpu"))
    torch.set_rng_state(rng)
    return lists


TEST_LISTS = load_test_lists()

CANNOT_RUN = {
    "cudnn_convolution": "needs cuDNN",
    "cudnn_convolution_transpose": "needs cuDNN",
    "einsum": "torch's entry has an equation for four dimensions and operands of two: no device runs it",
}

# What rounds between its products is compared in test_autocast_products.py.
SEVERAL_ROUNDINGS = ("chain_matmul", "linalg_multi_dot")


def entries(listname, namespace):
    for number, (name, args, *rest) in enumerate(getattr(TEST_LISTS, listname)):
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        skip = [pytest.mark.skip(reason=CANNOT_RUN[name])] if name in CANNOT_RUN else []
        yield pytest.param(namespace, name, args, kwargs, id=f"{listname}-{name}-{number}", marks=skip)


def call(namespace, name, args, kwargs):
    if namespace == "method":
        return getattr(args[0], name)(*args[1:], **kwargs)
    return getattr(namespace, name)(*args, **kwargs)


def change(value, dtype):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(change(item, dtype) for item in value)
    return value


def first(result):
    return result[0] if isinstance(result, (list, tuple)) else result


FP16_ENTRIES = [
    *entries("torch_fp16", torch),
    *entries("nn_fp16", torch._C._nn),
    *entries("linalg_fp16", torch._C._linalg),
    *entries("methods_fp16", "method"),
]
FP32_ENTRIES = [
    *entries("torch_fp32", torch),
    *entries("nn_fp32", torch._C._nn),
    *entries("methods_fp32", "method"),
]
PROMOTE_ENTRIES = [*entries("torch_need_autocast_promote", torch)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("namespace", "name", "args", "kwargs"), FP16_ENTRIES)
def test_low_precision_entry(namespace, name, args, kwargs, dtype):
    """Output in the region's dtype, and the values of operands rounded to it, computed in fp32, rounded once."""
    expected = first(call(namespace, name, change(change(args, dtype), torch.float32), kwargs)).to(dtype)
    with cuda_autocast(dtype):
        result = first(call(namespace, name, args, kwargs))
    assert result.dtype is dtype
    if name not in SEVERAL_ROUNDINGS:
        assert torch.equal(result, expected)


def assert_in_fp32(run, namespace, name, args, kwargs):
    expected = first(call(namespace, name, change(args, torch.float32), kwargs))
    with run:
        result = first(call(namespace, name, args, kwargs))
    assert result.dtype is torch.float32
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("namespace", "name", "args", "kwargs"), FP32_ENTRIES + PROMOTE_ENTRIES)
def test_entry_in_fp32(namespace, name, args, kwargs):
    assert_in_fp32(cuda_autocast(), namespace, name, args, kwargs)


@pytest.mark.parametrize(("namespace", "name", "args", "kwargs"), FP16_ENTRIES + FP32_ENTRIES + PROMOTE_ENTRIES)
def test_the_reference_computes_every_entry_in_fp32(namespace, name, args, kwargs):
    assert_in_fp32(apply_policy(REFERENCE, torch.device("cpu")), namespace, name, args, kwargs)


def test_banned_entries():
    for name, args, namespace in TEST_LISTS.banned:
        with cuda_autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(namespace, name)(*args)
        with cuda_autocast(), torch.autocast("cuda", enabled=False):
            off = getattr(namespace, name)(*args)
        with apply_policy(REFERENCE, torch.device("cpu")):
            assert torch.equal(getattr(namespace, name)(*args), off)


BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
QUICK = ("attention by hand", "region in fp32", "region in bf16", "custom functions", "mixture density")
SLOW = (
    "encoder layer",
    "rotations",
    "spectrogram",
    "vector quantization",
    "depthwise, group norm, hardswish",
    "triplets",
)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import autocast_judge

    yield autocast_judge
    for name in ("autocast_judge", "autocast_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("low", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_no_dtype_differs_from_torchs_own(bench, name, low):
    verdicts = bench.judge(name, low)
    assert [str(verdict.ran.call.op) for verdict in verdicts if verdict.differs] == []
    assert sum(verdict.gives is not None for verdict in verdicts) >= 0.9 * len(verdicts) > 0


def test_another_dtype_is_told(bench):
    ran = next(ran for ran in bench.record("attention by hand", FP16) if ran.call.name == "softmax")
    assert ran.gave == (torch.float32,)
    assert not bench.ask(ran).differs
    assert bench.ask(replace(ran, gave=(torch.float16,))).differs
    assert bench.ask(replace(ran, enabled=False)).gives == (torch.float16,)
