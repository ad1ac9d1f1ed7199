import io
from dataclasses import replace

import factory
import pytest
from rich.console import Console

from nandoctor.renderers.inspect_dump import print_inspection

HOSTILE = "[red]a\x1b[31m\nb"


def printed(summary, width=100):
    console = Console(file=io.StringIO(), width=width)
    print_inspection(summary, console)
    return console.file.getvalue()


def test_the_file_its_weights_and_its_arrays():
    text = printed(factory.dump(prefix="module."))
    assert text.splitlines()[0] == "NaN.pth"
    assert "187 kB, a plain dict of arrays" in text
    assert "62 tensors, 46,113 values" in text
    assert "module. (taken off every name)" in text
    assert any(line.split() == ["step", "49"] for line in text.splitlines())
    rows = [line.split() for line in text.splitlines()]
    assert ["image", "[4,", "3,", "32,", "32]", "float32", "input", "none"] in rows
    assert ["logit", "[4,", "1,", "32,", "32]", "float32", "output", "1,024", "NaN"] in rows


def test_every_kind_of_nonfinite_value_is_counted():
    mixed = replace(factory.array("x", 1), num_posinf=2, num_neginf=3)
    assert "1 NaN, 2 +Inf, 3 -Inf" in printed(factory.dump(arrays=(mixed,)))


def test_bad_buffers_notes_and_what_is_missing():
    text = printed(factory.state().dump)
    assert "non-finite buffers" in text
    assert "norm4.running_var" in text
    assert "non-finite weights" not in text
    text = printed(factory.dump(missing=("No input is saved: add it.",), notes=("EMA weights left aside.",)))
    assert "missing  No input is saved: add it." in text
    assert "note     EMA weights left aside." in text


def test_a_long_list_of_weights_is_cut_and_counted():
    weights = tuple(factory.array(f"layer{i}.weight", 5, role=None) for i in range(300))
    text = printed(factory.dump(bad_weights=weights))
    assert "layer19.weight" in text
    assert "layer20.weight" not in text
    assert "and 280 more" in text


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_console(width):
    arrays = (factory.array("deep." * 40 + "name", shape=(8, 4096, 4096), role="output"),)
    text = printed(factory.dump(path="p" * 300, arrays=arrays, scalars=(("k" * 90, "v" * 500),)), width)
    assert max(map(len, text.splitlines())) <= width


def test_hostile_names_are_shown_as_they_are():
    hostile = replace(factory.array(HOSTILE), dtype=HOSTILE)
    summary = factory.dump(
        path=HOSTILE, prefix=HOSTILE, arrays=(hostile,), scalars=((HOSTILE, HOSTILE),), missing=(HOSTILE,)
    )
    text = printed(summary)
    assert "\x1b" not in text
    assert text.count(r"[red]a\x1b[31m\nb") == 6


def test_what_is_printed_is_bounded_whatever_the_file_holds():
    many = [f"{index:03d}" + "x" * 500 for index in range(400)]
    arrays = tuple(factory.array(name) for name in many)
    scalars, texts = tuple((name, name) for name in many), tuple(many)
    text = printed(factory.dump(arrays=arrays, bad_weights=arrays, scalars=scalars, notes=texts, missing=texts))
    assert len(text) < 30_000
    assert text.count("and 380 more") == 3
    assert "and 780 more" in text
