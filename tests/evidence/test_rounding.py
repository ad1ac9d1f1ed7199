"""What becomes of a number in a format."""

from __future__ import annotations

import math

import pytest

from nandoctor.evidence.formats import BF16, FP8_E4M3, FP16, FP32
from nandoctor.evidence.rounding import SHOWN_FORMATS, round_constant


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
    assert round_constant(value, dtype).effect == effect


def test_the_error_is_relative():
    rounded = round_constant(1e-7, FP16)
    assert rounded.rounded == 2 * FP16.smallest_subnormal
    assert rounded.rel_err == pytest.approx(0.19209, abs=1e-5)


def test_a_power_of_two_is_exact_and_absorbed_late():
    rounded = round_constant(2.0**-10, FP16)
    assert (rounded.rel_err, rounded.absorbed_from) == (0.0, 4.0)


def test_an_overflowing_number_is_absorbed_nowhere():
    assert round_constant(1e6, FP16).absorbed_from == math.inf


def test_five_formats_are_shown():
    assert [shown.label for shown in SHOWN_FORMATS] == ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2", "fp32"]
