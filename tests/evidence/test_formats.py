"""Number formats against torch's own: limits from finfo, rounding from casts."""

import math

import pytest
import torch

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, effect_of

TORCH_FORMATS = [FP16, BF16, FP32, FP64, FP8_E4M3, FP8_E5M2]
LOW_FORMATS = [FP16, BF16, FP8_E4M3, FP8_E5M2]


def dtype_of(float_format):
    return getattr(torch, float_format.name)


def cast(value, float_format):
    """What torch makes of a float32 value."""
    return float(torch.tensor(value, dtype=torch.float32).to(dtype_of(float_format)).double())


def values_of(float_format):
    """Every non-negative finite value of a format of 8 or 16 bits, in ascending order, as float64."""
    num_bits = torch.finfo(dtype_of(float_format)).bits
    codes = torch.arange(2 ** (num_bits - 1), dtype=torch.int32)
    codes = codes.to(torch.uint8 if num_bits == 8 else torch.int16)
    values = codes.view(dtype_of(float_format)).double()
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("float_format", TORCH_FORMATS, ids=str)
def test_limits_are_those_of_finfo(float_format):
    limits = torch.finfo(dtype_of(float_format))
    assert float_format.max == limits.max
    assert float_format.eps == limits.eps
    assert float_format.smallest_normal == limits.tiny


@pytest.mark.parametrize("float_format", LOW_FORMATS, ids=str)
def test_every_value_of_the_format_rounds_to_itself(float_format):
    values = values_of(float_format).tolist()
    assert values[1] == float_format.smallest_subnormal
    assert [float_format.round(value) for value in values] == values


@pytest.mark.parametrize("float_format", LOW_FORMATS, ids=str)
def test_ties_between_neighbours_round_as_torch_does(float_format):
    values = values_of(float_format)
    ties = ((values[:-1] + values[1:]) / 2).tolist()[:: max(1, len(values) // 4096)]
    cast_by_torch = torch.tensor(ties, dtype=torch.float32).to(dtype_of(float_format)).double()
    assert [float_format.round(tie) for tie in ties] == cast_by_torch.tolist()


def test_the_tie_past_the_largest_value_of_e4m3fn_stays_finite():
    assert FP8_E4M3.holds(464.0)
    assert FP8_E4M3.round(464.0) == FP8_E4M3.max == 448.0
    assert math.isnan(FP8_E4M3.round(math.nextafter(464.0, 500.0)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_values_stay_what_they_are_and_are_not_held(value):
    assert repr(FP16.round(value)) == repr(value)
    assert not FP16.holds(value)


def test_headroom_counts_doublings():
    assert FP16.headroom_bits(FP16.max) == 0.0
    assert FP16.headroom_bits(-FP16.max / 8) == pytest.approx(3.0)
    assert FP16.headroom_bits(FP16.max * 2) == pytest.approx(-1.0)
    assert FP16.headroom_bits(0.0) == math.inf


@pytest.mark.parametrize(
    ("value", "dtype", "effect"),
    [
        (1e-8, FP16, "zero"),
        (1e-7, FP16, "subnormal"),
        (1e-4, FP16, "normal"),
        (1e-8, BF16, "normal"),
        (1e-40, FP32, "subnormal"),
        (9e-4, FP8_E4M3, "zero"),
        (-1e-7, FP16, "subnormal"),
        (1e6, FP16, "overflow"),
        (1e6, FP8_E4M3, "overflow"),
    ],
)
def test_effect(value, dtype, effect):
    assert effect_of(dtype.round(value), dtype) == effect
