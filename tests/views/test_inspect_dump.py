from dataclasses import replace

import factory
from surfaces import terminal


def test_every_kind_of_nonfinite_value_is_counted():
    mixed = replace(factory.array("x", 1), num_posinf=2, num_neginf=3)
    assert "1 NaN, 2 +Inf, 3 -Inf" in terminal(factory.dump(arrays=(mixed,)))


def test_notes_and_what_is_missing():
    text = terminal(factory.dump(missing=("No input is saved: add it.",), notes=("EMA weights left aside.",)))
    assert "missing       No input is saved: add it." in text
    assert "note          EMA weights left aside." in text


def test_what_is_printed_is_bounded_whatever_the_file_holds():
    many = [f"{index:03d}" + "x" * 500 for index in range(400)]
    arrays = tuple(factory.array(name) for name in many)
    scalars, texts = tuple((name, name) for name in many), tuple(many)
    text = terminal(factory.dump(arrays=arrays, bad_weights=arrays, scalars=scalars, notes=texts, missing=texts))
    assert len(text) < 40_000
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("Rows 1 to 20 of 400.") == 1
    assert "and 397 more" in " ".join(text.split())
    assert "and 380 more" in text
    assert "and 780 more" in text
