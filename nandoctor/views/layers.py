"""Select the layers that a picture or a table shows, both runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import FirstNonfinite, LayerRow, Report, Runs
from nandoctor.evidence.trace import name_run


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPair:
    """One module call in the autocast run and in the fp32 run; None for a run that never reached it."""

    autocast: LayerRow | None
    fp32: LayerRow | None

    @property
    def either(self) -> LayerRow:
        """The autocast row, or the fp32 one if there is none, for what both share (names, depth)."""
        return self.rows[0]

    @property
    def label(self) -> str:
        """The module path; later calls are numbered."""
        return self.either.place.label

    @property
    def rows(self) -> tuple[LayerRow, ...]:
        """The existing rows, autocast first."""
        return tuple(row for row in (self.autocast, self.fp32) if row is not None)

    @property
    def finite(self) -> bool:
        """True if the call returned finite values in both runs."""
        return all(row.finite for row in self.rows)

    @property
    def headroom_bits(self) -> float | None:
        """The headroom of the fp32 value, else of the autocast run's; None if the layer has no finite value."""
        return next((row.headroom_bits for row in self.rows[::-1] if row.headroom_bits is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers worth showing; `first_nonfinite` is the index of the one in whose output the failure shows first."""

    pairs: tuple[LayerPair, ...]
    first_nonfinite: int | None = None

    def tightest(self) -> int | None:
        """Return the index of the layer with the least headroom; None if no layer has a finite value."""
        found = {index: bits for index, pair in enumerate(self.pairs) if (bits := pair.headroom_bits) is not None}
        return min(found, key=found.__getitem__, default=None)


def select_layers(report: Report, *, every: bool = False) -> Layers:
    """Return the calls with floating-point outputs.

    Containers that only pass on an inner layer's output are left out unless `every` call is asked for. One that
    computes something in its own forward, such as a residual add, is kept.
    """
    if report.runs is None:
        return Layers(pairs=())
    calls = _align_calls(report.runs)
    failing = _find_failing(calls, report.first_nonfinite)
    left_out = set[int]() if every else _repeats(calls) - {failing}
    returns = [any(row.outputs for row in pair.rows) for pair in calls]
    shown = [index for index in range(len(calls)) if every or (index not in left_out and returns[index])]
    pairs = tuple(calls[index] for index in shown)
    return Layers(pairs=pairs, first_nonfinite=shown.index(failing) if failing in shown else None)


def _find_failing(calls: Sequence[LayerPair], first: FirstNonfinite | None) -> int | None:
    """Return the index of the call whose output is the first non-finite one, or that was given what a forward made."""
    place = None if first is None or first.phase != "forward" else first.seen_in or first.place
    found = (index for index, pair in enumerate(calls) if place is not None and pair.either.place.key == place.key)
    return next((index for index in found if not calls[index].finite), None)


def _align_calls(runs: Runs) -> tuple[LayerPair, ...]:
    """Pair both runs' calls by key, in the order of the run that got further: an exception may have ended the other."""
    autocast = {row.place.key: row for row in runs.autocast.modules}
    fp32 = {row.place.key: row for row in runs.fp32.modules}
    longer, shorter = (fp32, autocast) if len(fp32) > len(autocast) else (autocast, fp32)
    return tuple(LayerPair(autocast=autocast.get(key), fp32=fp32.get(key)) for key in {**longer, **shorter})


def name_runs(runs: Runs) -> tuple[str, str]:
    """Return what a legend calls the fp32 run and the run as in training: "fp32", "fp16 autocast"."""
    run = runs.autocast
    if run.dtype != FP32:
        return "fp32", name_run(run.policy, run.dtype)
    return ("fp32", "fp32") if runs.are_one else ("fp32 throughout", "as your code runs it")


def _repeats(calls: Sequence[LayerPair]) -> set[int]:
    """Return the indices of containers that return only what calls before them have returned."""
    repeats, made = set[int](), set[tuple[object, ...]]()
    for index, call in enumerate(calls):
        # Regardless of place and shape: a reshaped output is still the same one.
        outputs = {(it.dtype.name, it.numel, it.finite, it.min, it.max) for row in call.rows for it in row.outputs}
        is_container = index > 0 and calls[index - 1].either.depth > call.either.depth
        if is_container and outputs <= made:
            repeats.add(index)
        made |= outputs
    return repeats
