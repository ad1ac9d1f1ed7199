from dataclasses import replace

import factory
import pytest

from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import Runs
from nandoctor.views.layers import select_layers


def runs_of(*rows, fp32=None):
    return Runs(
        autocast=factory.run(rows, dtype=factory.FP16), fp32=factory.run(fp32 if fp32 is not None else rows, dtype=FP32)
    )


def labels(layers):
    return [pair.label for pair in layers.pairs]


def block(residual, size=1.0):
    """A block of two layers that returns what the second made, or what it made of that itself."""
    return (
        factory.row("block.a", "Linear", factory.tensor(size), depth=2),
        factory.row("block.b", "Linear", factory.tensor(2.0 * size), depth=2),
        factory.row("block", "Block", factory.tensor((3.0 if residual else 2.0) * size), depth=1),
        factory.row("", "Net", factory.tensor((3.0 if residual else 2.0) * size), depth=0),
    )


@pytest.mark.parametrize(("residual", "more"), [(False, []), (True, ["block"])])
def test_a_container_is_shown_if_it_computes(residual, more):
    assert labels(select_layers(factory.report(runs_of(*block(residual))))) == ["block.a", "block.b", *more]


def test_a_container_that_gathers_and_reshapes_outputs_passes_on():
    a = factory.row("a", "Linear", factory.tensor(1.0), depth=1)
    b = factory.row("b", "Linear", factory.tensor(2.0), depth=1)
    flat = factory.tensor(2.0, path=".features", shape=(4 * 16 * 32 * 32,))
    root = replace(factory.row("", "Net", flat, depth=0), outputs=(flat, factory.tensor(1.0, path=".logit")))
    assert labels(select_layers(factory.report(runs_of(a, b, root)))) == ["a", "b"]


INFINITE = factory.tensor(9.0, nonfinite=factory.counts(3, kind="+inf"))
BLOCKS = (
    *block(residual=True)[:3],
    *(factory.put(row, module=row.place.module.replace("block", "next")) for row in block(True, size=10.0)[:3]),
)
IN_NEXT = {"where": "between", "seen_in": BLOCKS[-1].place}


def failing(origin, **seen):
    """The layers of two blocks of which an operation is to blame, or the place where it was seen alone."""
    made = factory.report(runs_of(*BLOCKS))
    first = factory.first(replace(BLOCKS[2], outputs=(INFINITE,)), **seen) if seen else None
    if origin:
        where = {"place": BLOCKS[2].place, "op": "matmul", "output": INFINITE, "would_be": 7e4, **origin}
        origin = factory.origin(factory.precision(), **where)
    return select_layers(replace(made, first_nonfinite=first, origin=origin or None))


@pytest.mark.parametrize(
    ("origin", "seen", "name", "place"),
    [
        ({}, IN_NEXT, "the forward of block", 3),
        ({"phase": "forward"}, IN_NEXT, "matmul in block", 3),
        ({"phase": "forward"}, {}, "matmul in block", 2),
        ({"phase": "forward", "place": factory.ROOT}, {}, "matmul in the model (UNet)", 6),
        ({"phase": "loss"}, {}, "matmul in block", 6),
        ({"phase": "backward"}, {}, "the backward of matmul in block", 6),
        ({}, {"where": "loss", "phase": "loss"}, "the loss", 6),
        ({}, {"where": "batch", "phase": "input"}, "an input in the batch", 0),
    ],
)
def test_what_is_in_no_output_has_a_row_where_it_happens(origin, seen, name, place):
    layers = failing(origin, **seen)
    assert (layers.first_nonfinite, layers.pairs[place].label) == (place, name)
    assert len(layers.pairs) == 7
    assert layers.pairs[place].autocast.outputs == (INFINITE,)
    assert layers.pairs[place].fp32.absmax == (7e4 if origin else 0.83)


@pytest.mark.parametrize(
    ("center", "expected"), [(9, range(6, 12)), (0, range(6)), (19, range(14, 20)), (2, range(6)), (18, range(14, 20))]
)
def test_windows_stay_inside_and_full(center, expected):
    assert select_layers(factory.healthy(20)).window(center) == expected
