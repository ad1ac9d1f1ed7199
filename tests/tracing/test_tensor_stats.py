"""What is measured of one tensor, against naive counts over plain Python numbers, and where its values lie."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64
from nandoctor.tracing import tensor_stats
from nandoctor.tracing.tensor_stats import SAMPLE_SIZE, all_finite, collect, measure

NAN, INF = math.nan, math.inf
FLOATS = {
    torch.float16: FP16,
    torch.bfloat16: BF16,
    torch.float32: FP32,
    torch.float64: FP64,
    torch.float8_e4m3fn: FP8_E4M3,
    torch.float8_e5m2: FP8_E5M2,
}


def stats_of(tensor, *, counts=False):
    """The statistics of one tensor, None where there is nothing to measure."""
    reading = measure(tensor, counts=counts)
    return None if reading is None else collect([("here", reading)])[0]


def naive_counts(values):
    magnitudes = [abs(value) for value in values if math.isfinite(value) and value != 0]
    return {
        "num_nan": sum(math.isnan(value) for value in values),
        "num_posinf": values.count(INF),
        "num_neginf": values.count(-INF),
        "num_zero": values.count(0.0),
        "smallest": min(magnitudes, default=None),
    }


@pytest.mark.parametrize(("dtype", "float_format"), FLOATS.items())
def test_limits_of_a_finite_tensor_need_no_counts(dtype, float_format):
    stats = stats_of(torch.tensor([[-3.0, 0.5], [2.0, 0.0]]).to(dtype))
    assert (stats.path, stats.shape, stats.numel, stats.dtype) == ("here", (2, 2), 4, float_format)
    assert (stats.finite, stats.min, stats.max, stats.absmax) == (True, -3.0, 2.0, 3.0)
    assert stats.counts is None


SPECIAL = st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e-8, 2.0**-24, 2.0**-25, 6e-8, 1e-40, 6e-5, 65504.0, 1e30])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@settings(max_examples=50)
@given(values=st.lists(SPECIAL | st.floats(width=32), min_size=1, max_size=12))
def test_counts_are_naive_ones_and_limits_of_finite_values(dtype, values):
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    stats, expected = stats_of(tensor, counts=True), naive_counts(tensor.tolist())
    assert {name: getattr(stats.counts, name) for name in expected} == expected
    finite = [value for value in tensor.tolist() if math.isfinite(value)]
    assert (stats.min, stats.max) == (min(finite, default=None), max(finite, default=None))


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x.expand(2, 6, 7)])
@settings(max_examples=25)
@given(values=st.lists(SPECIAL | st.floats(width=32), min_size=42, max_size=42))
def test_counts_in_pieces_are_those_of_the_whole(layout, values):
    tensor = layout(torch.tensor(values, dtype=torch.float64).to(torch.float16).reshape(6, 7))
    whole = tensor_stats.count_exactly(tensor)
    with mock.patch.object(tensor_stats, "_AT_ONCE", 16):
        assert tensor_stats.count_exactly(tensor) == whole


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_of_no_numbers_nothing_is_counted(shape):
    counts, limits = tensor_stats.count_exactly(torch.zeros(shape))
    assert (counts.num_bad, counts.num_zero, counts.smallest, limits) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("shape", "nonfinite", "first", "samples"),
    [
        ((4, 3, 2), [(2, 1, 1), (3, 0, 0)], (2, 1, 1), (2, 3)),
        ((4,), [(1,), (3,)], (1,), (1, 3)),
        ((), [()], (), ()),
        ((1, 5), [(0, 4)], (0, 4), (0,)),
        ((2, 2), [], None, ()),
    ],
)
def test_the_first_nonfinite_index_and_the_nonfinite_samples(shape, nonfinite, first, samples):
    tensor = torch.zeros(shape)
    for index in nonfinite:
        tensor[index] = NAN
    counts = stats_of(tensor, counts=True).counts
    assert (counts.first_bad_index, counts.samples, counts.num_bad) == (first, samples, len(nonfinite))


def layouts():
    plain = torch.arange(24.0).reshape(1, 2, 3, 4)
    yield "transposed", plain.transpose(1, 3)
    yield "channels_last", plain.to(memory_format=torch.channels_last)
    yield "strided", plain[..., ::2]
    yield "expanded", torch.tensor([5.0]).expand(3, 4)
    yield "view", plain[:, 1]
    yield "parameter", torch.nn.Parameter(plain)
    yield "subclass", plain.as_subclass(type("Tagged", (torch.Tensor,), {}))
    yield "requires grad", plain.clone().requires_grad_() * 2


@pytest.mark.parametrize("tensor", [pytest.param(tensor, id=name) for name, tensor in layouts()])
def test_any_strides_give_the_numbers_in_logical_order(tensor):
    stats = stats_of(tensor, counts=True)
    assert stats.shape == tuple(tensor.shape)
    assert (stats.min, stats.max) == (tensor.detach().min(), tensor.detach().max())
    assert np.array_equal(stats.sample, tensor.detach().flatten().numpy())


def nothing_to_measure():
    eye = torch.eye(3)
    yield "int", torch.arange(3)
    yield "bool", torch.tensor([True])
    yield "empty", torch.empty(0, 3)
    yield "mkldnn", eye.to_mkldnn()
    yield "quantised", torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8)
    yield "meta", torch.empty(3, device="meta")
    yield "nested without rows", torch.nested.nested_tensor([])
    yield "masked", torch.masked.masked_tensor(eye, eye > 0)
    yield "lazy", torch.nn.LazyLinear(3).weight
    with FakeTensorMode():
        yield "fake", torch.empty(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("counts", [False, True])
def test_what_holds_no_plain_numbers_is_left_in_peace(counts):
    measured = [name for name, tensor in nothing_to_measure() if measure(tensor, counts=counts) is not None]
    assert measured == []


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_shows_its_stored_values(layout):
    tensor = torch.tensor([[0.0, 3.0], [math.inf, 0.0]]).to_sparse(layout=layout)
    stats = collect([("", measure(tensor, counts=True))])[0]
    assert (stats.shape, stats.finite, stats.absmax, stats.counts.num_bad, stats.counts.num_zero) == (
        (2,),
        False,
        3.0,
        1,
        0,
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    ("dtype", "part"), [(torch.complex32, FP16), (torch.complex64, FP32), (torch.complex128, FP64)]
)
def test_a_complex_tensor_is_measured_by_its_parts(dtype, part):
    stats = stats_of(torch.tensor([3 - 4j, complex(INF, 0)]).to(dtype).conj(), counts=True)
    assert (stats.shape, stats.numel, stats.dtype) == ((2, 2), 4, part)
    assert (stats.max, stats.counts.num_posinf, stats.counts.first_bad_index) == (4.0, 1, (1, 0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_measured_over_all_its_rows(layout):
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.tensor([[NAN, -8.0, 0.0]])], layout=layout)
    stats = stats_of(tensor, counts=True)
    assert (stats.numel, stats.absmax, stats.counts.num_nan) == (9, 8.0, 1)
    assert stats.counts.samples == ()


@pytest.mark.parametrize("width", [64, 100, 256, 1000])
def test_the_sample_of_a_large_tensor_spans_rows_and_columns(width):
    columns = torch.arange(float(width)).expand(1000, width)
    for positions, size in ((columns, width), (torch.arange(1000.0)[:, None].expand(1000, width), 1000)):
        sample = stats_of(positions).sample
        counts, _ = np.histogram(sample, bins=8, range=(0, size))
        assert len(sample) == SAMPLE_SIZE
        assert counts.min() > 0.8 * SAMPLE_SIZE / 8
        assert counts.max() < 1.2 * SAMPLE_SIZE / 8


def test_quantiles_are_those_of_the_nonzero_finite_magnitudes():
    values = torch.cat([torch.zeros(50), torch.arange(1.0, 102.0) * -1, torch.tensor([INF, NAN])])
    stats = stats_of(values)
    assert (stats.p05, stats.median, stats.p95) == (6.0, 51.0, 96.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_value_in_any_place_is_not_finite(value, dtype):
    for place in (0, 37, 99):
        tensor = torch.full((10, 10), 6e4, dtype=dtype)
        assert all_finite(tensor.t())
        tensor.view(-1)[place] = value
        assert not all_finite(tensor.t())
    assert all_finite(torch.empty(0, 3, dtype=dtype))
    assert not all_finite(torch.tensor(value, dtype=dtype).to_sparse())


def test_an_expanded_tensor_is_not_written_out():
    row = torch.tensor([[1.0], [-3.0], [NAN]])
    many = stats_of(row[:2].expand(2, 1 << 42))  # 32 TiB
    assert (many.min, many.max, many.numel) == (-3.0, 1.0, 2 << 42)
    counted = stats_of(row.expand(3, 1 << 42), counts=True).counts
    assert (counted.num_nan, counted.samples, counted.first_bad_index) == (1 << 42, (2,), (2, 0))
    counted = stats_of(row.mT.expand(1 << 22, 3), counts=True).counts
    assert (counted.num_nan, counted.samples[:2], counted.first_bad_index) == (1 << 22, (0, 1), (0, 2))
