"""What an error says can be printed anywhere, whatever a file or a model put into it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nandoctor import text as words
from nandoctor.errors import ModelError
from nandoctor.step.settings import OPTIONS

TEXT = st.lists(st.integers(0, 0x10FFFF).map(chr)).map("".join)
"""Of any characters; hypothesis' own texts begin with a table of all of them, for seconds."""


@given(TEXT)
def test_printable_text_moves_nothing(text):
    shown = words.printable(text)
    assert shown.isprintable()
    assert words.printable(shown) == shown


@given(TEXT, st.integers(1, 30))
def test_shortened_text_fits_and_keeps_both_ends(text, width):
    short = words.shorten(text, width)
    assert len(short) <= width
    if len(text) > width:
        head, _, tail = short.partition("…")
        assert text.startswith(head)
        assert text.endswith(tail)


WORDS = {
    words.number: [
        (65504.0, "65,504"), (81234.4, "81,234"), (999.7, "1,000"), (0.031234, "0.0312"), (8_123_456.0, "8,123,456"),
        (8_123_456.5, "8.12e6"), (6.3e7, "6.3e7"), (5.96e-8, "5.96e-8"), (-70000.0, "-70,000"), (999_999.7, "1e6"),
        (0.0, "0"), (float("inf"), "inf"), (float("nan"), "NaN"), (None, "?"),
    ],
    words.percent: [
        (0.004, "0.4 %"), (0.0439e-1, "0.44 %"), (0.18, "18 %"), (0.9999, "99.9 %"), (1.0, "100 %"), (25.0, "2,500 %"),
        (None, "?"),
    ],
    words.bits_text: [(None, "-"), (float("inf"), "Inf"), (-0.44, "-0.4"), (12.25, "12.2")],
    words.byte_size: [
        (0, "0 bytes"), (999, "999 bytes"), (187_000, "187 kB"), (1_250_000, "1.25 MB"), (10**16, "10,000 TB"),
    ],
    words.kinds_text: [(("nan", "+inf"), "NaN and +Inf"), ((), "non-finite values")],
    lambda value: words.excess(value, 65504): [
        (65756, "0.38 % above"), (81234, "24 % above"), (-210_400, "3.2x"), (6.3e7, "960x"), (65504, "100 % of"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("write", "value", "text"), [(write, *pair) for write, pairs in WORDS.items() for pair in pairs]
)
def test_values_in_words(write, value, text):
    assert write(value) == text


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_a_number_is_told_from_the_one_beside_it(value, other):
    assert value == other or words.number(value, unlike=other) != words.number(other)


def test_a_number_gets_the_digits_that_it_takes():
    assert words.number(1.0001, unlike=1.0) == "1.0001"
    assert words.number(65504.25, unlike=65504.0) == "65,504.2"
    assert words.number(65756.0, unlike=65504.0) == "65,756"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-8, "1e-8"), (1e-4, "1e-4"), (0.01, "0.01"), (-65504.0, "-65504"), (-1e9, "-1e9"), (1.5, "1.5"), (0.0, "0")],
)
def test_constants_are_spelled_as_in_code(value, text):
    assert words.constant(value) == text
    assert float(text) == value


def test_what_is_too_small_to_matter_is_told_by_a_bound():
    assert [words.percent(share) for share in (7.8e-7, 9.9e-6, 1e-5, 0.0)] == ["<0.001 %", "<0.001 %", "0.001 %", "0 %"]
    assert [words.within(share) for share in (7.8e-7, 0.0044)] == ["within 0.001 %", "within 0.44 %"]


def test_a_list_of_samples_that_was_cut_says_so():
    listed = tuple(range(1, 65))
    assert words.samples_text(listed, 300) == "samples 1, 2, 3 and at least 61 more"
    assert words.samples_text(listed[:-1], 300) == "samples 1, 2, 3 and 60 more"
    assert words.samples_text(listed) == "samples 1, 2, 3 and 61 more"
    assert words.samples_text(listed, 64) == "every sample"


def test_calls_are_counted_from_one():
    assert [words.ordinal(place) for place in (1, 2, 3, 4, 11, 12, 13, 21, 102)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd")
    ]
    assert (words.call_label("norm", 0), words.call_label("norm", 1)) == ("norm", "norm (2nd call)")
    assert words.call_label("norm", 0, "Norm") == "norm (Norm)"
    assert words.call_label("norm", 1, "Norm") == "norm (Norm, 2nd call)"


@pytest.mark.parametrize(
    ("told", "in_python"),
    [
        ("Give --model-arg K=V, or --no-strict.", 'Give model_args={"K": "V"}, or strict=False.'),
        (
            "try --model-arg a=1 --model-arg 'b=(1, 2)' --mode train.",
            'try model_args={"a": 1, "b": (1, 2)}, mode="train".',
        ),
        ("name it with --loss train.py:loss: a function", 'name it with loss="train.py:loss": a function'),
        ("(`fix --pick 1`) nandoctor fix x --seed 3", "(`fix --pick 1`) nandoctor fix x --seed 3"),
        *((f"pass {it.flag} to check", f"pass {name}=") for name, it in OPTIONS.items()),
    ],
)
def test_python_is_told_its_own_keywords(told, in_python):
    assert str(ModelError("", remedy=told)).removeprefix("\n").startswith(in_python)


def test_an_error_writes_out_what_is_not_visible():
    error = ModelError("Net has no \x00\x1b[31m\u202e.\nBeside it:\ta", remedy="Name \ud800.")
    assert error.message == "Net has no \\x00\\x1b[31m\\u202e.\nBeside it:\\ta"
    assert str(error).splitlines()[-1] == "Name \\ud800."
    assert error.args == (error.message,)
