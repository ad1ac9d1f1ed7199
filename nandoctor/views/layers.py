"""Select the layers that a picture or a table shows, both runs side by side, and make the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import FirstNonfinite, LayerRow, Report, Runs
from nandoctor.evidence.trace import Place, head_run, name_run
from nandoctor.text import bits_text, number, part_of, percent
from nandoctor.views.blocks import Column, Table, Tone, window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPair:
    """One module call in the autocast run and in the fp32 run; None for a run that never reached it."""

    autocast: LayerRow | None
    fp32: LayerRow | None

    @property
    def place(self) -> Place:
        """Which call it is, the same in both runs."""
        return self.rows[0].place

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


def select_layers(report: Report, *, every: bool = False) -> Layers:
    """Return the calls with floating-point outputs.

    Containers that only pass on an inner layer's output are left out unless `every` call is asked for. One that
    computes something in its own forward, such as a residual add, is kept.
    """
    if report.runs is None:
        return Layers(pairs=())
    autocast = {row.place.key: row for row in report.runs.autocast.modules}
    fp32 = {row.place.key: row for row in report.runs.fp32.modules}
    # In the order of the run that got further: an exception may have ended the other.
    longer, shorter = (fp32, autocast) if len(fp32) > len(autocast) else (autocast, fp32)
    calls = [LayerPair(autocast=autocast.get(key), fp32=fp32.get(key)) for key in {**longer, **shorter}]
    failing = _find_failing(calls, report.first_nonfinite)
    left_out = set[int]() if every else _repeats(calls) - {failing}
    returns = [any(row.outputs for row in pair.rows) for pair in calls]
    shown = [index for index in range(len(calls)) if every or (index not in left_out and returns[index])]
    pairs = tuple(calls[index] for index in shown)
    return Layers(pairs=pairs, first_nonfinite=shown.index(failing) if failing in shown else None)


def _find_failing(calls: Sequence[LayerPair], first: FirstNonfinite | None) -> int | None:
    """Return the index of the call whose output is the first non-finite one, or that was given what a forward made."""
    place = None if first is None or first.phase != "forward" else first.seen_in or first.place
    found = (index for index, pair in enumerate(calls) if place is not None and pair.place.key == place.key)
    return next((index for index in found if not calls[index].finite), None)


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
        is_container = index > 0 and calls[index - 1].rows[0].depth > call.rows[0].depth
        if is_container and outputs <= made:
            repeats.add(index)
        made |= outputs
    return repeats


_MIN_NAME_WIDTH, _MIN_TYPE_WIDTH = 14, 10
_MAX_NEAR = 6
_TIGHT_BITS = 1.0


def layers_near(report: Report) -> Table | None:
    """Return the layers around the first non-finite one, else around the tightest; None if nothing was run."""
    layers = select_layers(report)
    first = layers.first_nonfinite
    left = {index: bits for index, pair in enumerate(layers.pairs) if (bits := pair.headroom_bits) is not None}
    center = min(left, key=left.__getitem__, default=None) if first is None else first
    if report.runs is None or center is None:
        return None
    shown = window(center, len(layers.pairs), _MAX_NEAR)
    pairs = [layers.pairs[index] for index in shown]
    names = [f"{'> ' if index == first else '  '}{layers.pairs[index].place.label}" for index in shown]
    part = part_of(shown.stop, len(layers.pairs))
    headroom = f"headroom: doublings left before {report.runs.autocast.dtype} overflows"
    return Table(
        title=f"Largest magnitudes, layers {shown.start + 1:,} to {part} in execution order",
        columns=(Column("  layer", names, least=_MIN_NAME_WIDTH), *_number_columns(pairs, report.runs)),
        legend=headroom if first is None else f"> first non-finite; {headroom}",
        tones=_tones(layers)[shown.start : shown.stop],
    )


def _number_columns(pairs: Sequence[LayerPair], runs: Runs) -> tuple[Column, ...]:
    """Return what is known of each layer: its class, the largest values of both runs, the error and the headroom."""
    heading = head_run(runs.autocast.policy, runs.autocast.dtype)
    heading = "as run" if heading == str(FP32) and not runs.are_one else heading
    errors = [_error(pair.autocast.rel_err if pair.autocast else None) for pair in pairs]
    headroom = [pair.headroom_bits for pair in pairs]
    compared = (
        Column("fp32", [_range(pair.fp32) for pair in pairs], right=True, spare=1),
        Column("rel err", errors, right=True, spare=2),
    )
    return (
        Column("type", [pair.place.type for pair in pairs], least=_MIN_TYPE_WIDTH, spare=3),
        Column(heading, [_range(pair.autocast) for pair in pairs], right=True),
        *(() if runs.are_one else compared),
        Column("headroom", [bits_text(bits) for bits in headroom], right=True, tones=list(map(_tone_of, headroom))),
    )


def _range(row: LayerRow | None) -> str:
    """Return the largest magnitude, or the kinds of non-finite values; "-" for a call that the run never finished."""
    if row is None or not row.outputs:
        return "-"
    if row.finite:
        return "-" if row.absmax is None else number(row.absmax)
    kinds = {kind for stats in row.outputs if stats.counts for kind in stats.counts.kinds}
    if not kinds:
        return "NaN/Inf"
    signs = "".join(sign for sign in "+-" if f"{sign}inf" in kinds).replace("+-", "±")
    return " ".join(filter(None, ("NaN" if "nan" in kinds else "", f"{signs}Inf" if signs else "")))


def _error(error: float | None) -> str:
    return "-" if error is None else percent(error)


def _tone_of(bits: float | None) -> Tone:
    """Return how good the news is that so many bits are left before overflow."""
    if bits is None:
        return ""
    return "failed" if bits < 0 else "unclear" if bits < _TIGHT_BITS else "good"


def _tones(layers: Layers) -> list[Tone]:
    tones: list[Tone] = ["" if pair.finite else "failed" for pair in layers.pairs]
    if layers.first_nonfinite is not None:
        tones[layers.first_nonfinite] = "first"
    return tones


def every_layer(report: Report) -> Table | None:
    """Return all calls in execution order: a container returns after what is inside it."""
    if report.runs is None:
        return None
    layers = select_layers(report, every=True)
    inherited = [_error(pair.autocast.inherited_err if pair.autocast else None) for pair in layers.pairs]
    *numbers, headroom = _number_columns(layers.pairs, report.runs)
    compared = "" if report.runs.are_one else " rel err: relative error against fp32; inherited: that of the inputs."
    some_in_fp32 = "; autocast computes some layers in fp32" if numbers[1].heading == "autocast" else ""
    return Table(
        columns=(
            Column("layer", [pair.place.label for pair in layers.pairs]),
            *numbers,
            *([Column("inherited", inherited, right=True)] if compared else []),
            headroom,
        ),
        legend=f"{', '.join(column.heading for column in numbers[1:3])}: largest finite magnitudes{some_in_fp32}."
        f"{compared} headroom: doublings left before {report.runs.autocast.dtype} overflows, by the fp32 value where "
        "there is one.",
        tones=_tones(layers),
        is_searchable=True,
    )
