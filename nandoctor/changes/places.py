"""Places of changes: the site of an op, in words too, and the ops around it in the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.trace import OpCall, OpTensor
from nandoctor.ops import SINGULAR_INPUTS
from nandoctor.text import file_name


def site_of(op: OpCall) -> OpSite:
    """Return the place in the code of a traced op."""
    return OpSite(module=op.place.module, type=op.place.type, op=op.op, nth=op.nth, source=op.source)


def place_of(site: OpSite) -> str:
    """Return a site as "line 3 of net.py"; "" if its line is unknown."""
    return "" if site.source is None else f"line {site.source.line} of {file_name(site.source.file)}"


def in_place(site: OpSite) -> str:
    """Return a site as " in line 3 of net.py", for the end of a title; "" if its line is unknown."""
    return f" in {place_of(site)}" if site.source else ""


def dims_of(op: OpCall) -> str:
    """Return the dimensions that an op works along as code, as the run took them; "" if those are all."""
    dims = [f"{value:g}" for name, value in op.scalars if name.partition("[")[0] == "dim"]
    return f"({', '.join(dims)})" if len(dims) > 1 else "".join(dims)


def singular_inputs(op: OpCall) -> tuple[OpTensor, ...]:
    """Return the inputs for which the op, or its derivative, is infinite at some value."""
    names = SINGULAR_INPUTS.get(op.op, ())
    return tuple(tensor for tensor in op.inputs if tensor.name in names)


def maker_of(tensor: OpTensor | None, ops: Sequence[OpCall]) -> OpCall | None:
    """Return the op of the run that wrote a tensor last, None if none did."""
    return None if tensor is None or tensor.producer is None else ops[tensor.producer]


def ancestors(
    ops: Sequence[OpCall], tensor: OpTensor, steps: int, *, through: frozenset[str] | None = None
) -> Iterator[OpCall]:
    """Yield the ops that made `tensor`, nearest first, at most `steps` back; `through`: pass these op names only."""
    waiting, seen = [(tensor.producer, steps)], set[int]()
    for order, num_left in waiting:  # it grows meanwhile
        if order is None or order in seen or not num_left:
            continue
        seen.add(order)
        yield ops[order]
        if through is None or ops[order].op in through:
            waiting += [(parent.producer, num_left - 1) for parent in ops[order].inputs]


def descendants(ops: Sequence[OpCall], made: int, steps: int) -> Iterator[OpCall]:
    """Yield the ops that use the output of the op `made`, nearest first, at most `steps` further on."""
    wave = {made}
    for _ in range(steps):
        found = [op for op in ops if any(tensor.producer in wave for tensor in op.inputs)]
        yield from found
        wave = {op.order for op in found}
