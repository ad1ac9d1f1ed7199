"""Select the layers that a picture or a table shows, both runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nandoctor.evidence.report import LayerRow, Report, Runs
from nandoctor.evidence.trace import Place, TensorStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPair:
    """One module call in the autocast run and in the fp32 run; None for a run that never reached it."""

    autocast: LayerRow | None
    fp32: LayerRow | None

    @property
    def either(self) -> LayerRow:
        """The autocast row, or the fp32 one if there is none, for what both share (names, depth)."""
        row = self.autocast or self.fp32
        assert row is not None
        return row

    @property
    def label(self) -> str:
        """The module path; later calls are numbered."""
        return self.place.label

    @property
    def place(self) -> Place:
        """The module call."""
        return self.either.place

    @property
    def rows(self) -> tuple[LayerRow, ...]:
        """The existing rows, autocast first."""
        return tuple(row for row in (self.autocast, self.fp32) if row is not None)

    @property
    def headroom_bits(self) -> float | None:
        """The smaller headroom of both runs; None if the layer has no finite value."""
        return min((row.headroom_bits for row in self.rows if row.headroom_bits is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers worth showing. `first_nonfinite` is the index of the one where non-finite values were first seen.

    `before_nonfinite` is True if the value was seen in that layer's input, not in its output.
    """

    pairs: tuple[LayerPair, ...]
    first_nonfinite: int | None
    before_nonfinite: bool

    def window(self, center: int, before: int, after: int) -> range:
        """Return the indices around `center`, moved inwards at either end so that the window keeps its size."""
        size = min(before + after + 1, len(self.pairs))
        start = min(max(center - before, 0), len(self.pairs) - size)
        return range(start, start + size)

    def tightest(self) -> int | None:
        """Return the index of the layer with the least headroom in either run; None if no layer has a finite value."""
        found = {index: bits for index, pair in enumerate(self.pairs) if (bits := pair.headroom_bits) is not None}
        return min(found, key=found.__getitem__, default=None)


def align_calls(runs: Runs) -> tuple[LayerPair, ...]:
    """Pair both runs' calls by key, in the order of the run that got further: an exception may have ended the other."""
    autocast = {row.place.key: row for row in runs.autocast.modules}
    fp32 = {row.place.key: row for row in runs.fp32.modules}
    longer, shorter = (fp32, autocast) if len(fp32) > len(autocast) else (autocast, fp32)
    return tuple(LayerPair(autocast=autocast.get(key), fp32=fp32.get(key)) for key in {**longer, **shorter})


def select_layers(report: Report) -> Layers:
    """Return the calls with floating-point outputs, without containers that only pass on an inner layer's output.

    A container that computes something in its own forward, such as a residual add, is kept.
    """
    if report.runs is None:
        return Layers(pairs=(), first_nonfinite=None, before_nonfinite=False)
    pairs = align_calls(report.runs)
    nonfinite = _find_first_nonfinite(report, pairs)
    repeats = _repeats(pairs) - {nonfinite}
    with_output = [index for index, pair in enumerate(pairs) if any(row.outputs for row in pair.rows)]
    shown = [index for index in with_output if index not in repeats]
    first = next((place for place, index in enumerate(shown) if nonfinite is not None and index >= nonfinite), None)
    where = report.first_nonfinite.where if report.first_nonfinite else "output"
    return Layers(
        pairs=tuple(pairs[index] for index in shown), first_nonfinite=first, before_nonfinite=where != "output"
    )


def _find_first_nonfinite(report: Report, pairs: Sequence[LayerPair]) -> int | None:
    """Return the index of the call whose output was first non-finite, or of the first to return after it was seen."""
    first = report.first_nonfinite
    if first is None or not pairs:
        return None
    if first.where == "batch":
        return 0
    for index, pair in enumerate(pairs):
        if first.seen_in is not None and pair.place.key == first.seen_in.key:
            start = index  # go back to the first call inside: a container returns after all of them
            while start > 0 and pairs[start - 1].either.depth > pair.either.depth:
                start -= 1
            return start
        if first.where == "output" and pair.place.key == first.place.key:
            return index
    return None


def _repeats(pairs: Sequence[LayerPair]) -> set[int]:
    """Return the indices of containers whose outputs all come from calls directly inside them."""
    repeats: set[int] = set()
    returned: list[LayerPair] = []  # calls with a container that has not returned yet
    for index, pair in enumerate(pairs):
        inside: list[LayerPair] = []
        while returned and returned[-1].either.depth > pair.either.depth:
            inside.append(returned.pop())
        if inside and _passes_on(pair, inside):
            repeats.add(index)
        returned.append(pair)
    return repeats


def _passes_on(container: LayerPair, inside: Sequence[LayerPair]) -> bool:
    made = {_fingerprint(stats) for call in inside for row in call.rows for stats in row.outputs}
    return all(_fingerprint(stats) in made for row in container.rows for stats in row.outputs)


def _fingerprint(stats: TensorStats) -> tuple[object, ...]:
    """Return what identifies a tensor regardless of place and shape: a reshaped output is still the same one."""
    return (stats.dtype.name, stats.numel, stats.finite, stats.min, stats.max)
