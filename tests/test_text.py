import pytest
from hypothesis import given
from hypothesis import strategies as st

from nandoctor import text as words


@given(st.text(alphabet=st.characters()))
def test_printable_text_moves_nothing(text):
    shown = words.printable(text)
    assert shown.isprintable()
    assert words.printable(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("block.1\x1b[31m", r"block.1\x1b[31m"),
        ("two\nlines\r\ttab", r"two\nlines\r\ttab"),
        ("\u202eevil", r"\u202eevil"),
        ("\ud800", r"\ud800"),
        ("Größe.层", "Größe.层"),
    ],
)
def test_what_is_not_visible_is_written_out(text, shown):
    assert words.printable(text) == shown


@given(st.text(), st.integers(1, 30))
def test_shortened_text_fits_and_keeps_both_ends(text, width):
    short = words.shorten(text, width)
    assert len(short) <= width
    if len(text) > width:
        head, _, tail = short.partition("…")
        assert text.startswith(head)
        assert text.endswith(tail)


def test_shortening_leaves_what_fits():
    assert words.shorten("encoder", 7) == "encoder"
    assert words.shorten("encoder.layers.10.attention", 16) == "encod….attention"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (65504.0, "65504"),
        (81234.0, "81234"),
        (0.031234, "0.0312"),
        (8_123_456.0, "8.12e+06"),
        (5.96e-8, "5.96e-08"),
        (-70000.0, "-70000"),
        (999_999.7, "1e+06"),
        (0.0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_numbers(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(("ratio", "text"), [(81234 / 65504, "1.24"), (65520 / 65504, "1.0002"), (8.1e5, "8.1e+05")])
def test_ratios_above_one_stay_above_one(ratio, text):
    assert words.times(ratio) == text


def test_lists_as_prose():
    assert words.join_words([]) == ""
    assert words.join_words(["a"]) == "a"
    assert words.join_words(["a", "b", "c"]) == "a, b and c"
    assert words.join_first(["a", "b", "c"], 3) == "a, b and c"
    assert words.join_first(["a", "b", "c", "d", "e"], 3) == "a, b, c and 2 more"


def test_kinds():
    assert words.kinds_text(("nan", "+inf")) == "NaN and +Inf"
    assert words.kinds_text(()) == "non-finite values"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (187_000, "187 kB"), (1_250_000, "1.25 MB"), (10**16, "1e+04 TB")],
)
def test_sizes(nbytes, text):
    assert words.byte_size(nbytes) == text


@pytest.mark.parametrize(
    ("place", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (22, "22nd"), (113, "113th")],
)
def test_places_are_counted_from_one(place, text):
    assert words.ordinal(place) == text
