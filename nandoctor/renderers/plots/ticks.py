"""The names of layers along the ranges plot."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from nandoctor.renderers.layers import LayerPair, Layers
from nandoctor.renderers.plots.ranges import MAX_BARS, NONFINITE_COLOR
from nandoctor.text import brief

_NAME_WIDTH = 44
_MAX_NAMES = 70
_FAIR_NUMBER = 12
_MAX_DEPTH = 6


def name_layers(axes: Axes, layers: Layers, shown: range) -> None:
    """Name the layers at the indices `shown`: each of them, or where they are too many the blocks they lie in."""
    if len(shown) > MAX_BARS:
        _write(axes, _choose(layers), layers.first_nonfinite)
    else:
        _write(axes, [(index, layers.pairs[index].label) for index in shown], layers.first_nonfinite)


def _choose(layers: Layers) -> list[tuple[int, str]]:
    """The first non-finite layer, and blocks of the model where they begin, as far as their names do not collide."""
    wanted = _block_starts(layers.pairs)
    if layers.first_nonfinite is not None:
        wanted.insert(0, (layers.first_nonfinite, layers.pairs[layers.first_nonfinite].label))
    chosen: list[tuple[int, str]] = []
    for index, name in wanted:
        if all(abs(index - other) >= len(layers.pairs) / _MAX_NAMES for other, _ in chosen):
            chosen.append((index, name))
    return sorted(chosen)


def _block_starts(pairs: Iterable[LayerPair]) -> list[tuple[int, str]]:
    """Where each block begins, and its path: the coarsest split of the model that gives a fair number of blocks."""
    modules = [pair.place.module.split(".") for pair in pairs]
    starts: list[tuple[int, str]] = []
    for depth in range(1, _MAX_DEPTH + 1):
        blocks = [".".join(steps[:depth]) for steps in modules]
        starts = [(i, block) for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
        if len(starts) >= _FAIR_NUMBER:
            break
    return starts


def _write(axes: Axes, named: list[tuple[int, str]], first_nonfinite: int | None) -> None:
    names = [brief(name, _NAME_WIDTH) for _, name in named]
    # parse_math: a dollar sign in a name is no formula, and half a formula raises when it is drawn.
    axes.set_xticks([index for index, _ in named], names, rotation=90, size=7.5, parse_math=False)
    axes.grid(axis="x", color="black", alpha=0.08, linewidth=0.6)
    for (index, _), label in zip(named, axes.get_xticklabels(), strict=True):
        if index == first_nonfinite:
            label.set(color=NONFINITE_COLOR, weight="bold")
