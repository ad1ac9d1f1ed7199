from dataclasses import replace

import factory
import pytest

from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import Runs
from nandoctor.views.layers import select_layers


def runs_of(*rows):
    return Runs(autocast=factory.run(rows, dtype=factory.FP16), fp32=factory.run(rows, dtype=FP32))


def block(name, size):
    """Two layers, and a block that returns what it made itself of what the second made."""
    return (
        factory.row(f"{name}.a", "Linear", factory.tensor(size), depth=2),
        factory.row(f"{name}.b", "Linear", factory.tensor(2.0 * size), depth=2),
        factory.row(name, "Block", factory.tensor(3.0 * size), depth=1),
    )


BLOCKS = (*block("block", 1.0), *block("next", 10.0))
INFINITE = factory.tensor(9.0, nonfinite=factory.counts(3, kind="+inf"))


@pytest.mark.parametrize(
    ("seen", "label"),
    [
        ({"where": "output"}, "block"),
        ({"where": "between", "seen_in": BLOCKS[3].place}, "next.a"),
        ({"where": "between", "seen_in": BLOCKS[4].place}, None),
        ({"where": "loss", "phase": "loss"}, None),
        ({"where": "batch", "phase": "input"}, None),
    ],
)
def test_the_layer_is_marked_in_whose_output_it_shows_first(seen, label):
    """What the code between two layers made shows in the second, if that does not remove it."""
    rows = [replace(row, outputs=(INFINITE,)) if row in BLOCKS[2:4] else row for row in BLOCKS]
    layers = select_layers(replace(factory.report(runs_of(*rows)), first_nonfinite=factory.first(rows[2], **seen)))
    assert len(layers.pairs) == 6
    place = layers.first_nonfinite
    assert (None if place is None else layers.pairs[place].place.label) == label
