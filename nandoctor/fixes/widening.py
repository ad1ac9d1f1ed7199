"""Finds the ops that a change keeps in fp32, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nandoctor.changes.keep_fp32 import KeepLines, KeepModule, KeepOp
from nandoctor.evidence.edits import Edit, FixCost, SingleEdit, flatten
from nandoctor.evidence.formats import BF16, FP16, FP64
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import MOVES, PRODUCTS, is_factor, num_terms


def widens(edit: SingleEdit, op: OpCall) -> bool:
    """Return True if a change keeps an op in fp32."""
    if isinstance(edit, KeepModule):
        return op.place.module == edit.module or (edit.children and is_below(op.place.module, edit.module))
    if isinstance(edit, KeepLines):
        return op.source is not None and op.source.whole in edit.lines
    if not isinstance(edit, KeepOp) or edit.site.source is None or op.source is None:
        return False
    is_there = op.source.whole == edit.site.source.whole if not edit.site.op else op.source == edit.site.source
    return is_there and edit.site.op in ("", op.op)


def is_low(op: OpCall) -> bool:
    """Return True if an op has an output in fp16 or bf16."""
    return any(made.dtype in (FP16, BF16) for made in op.outputs)


def is_below(path: str, ancestor: str) -> bool:
    """Return True if a module is `ancestor` or inside it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


_NUM_BYTES = {FP16: 2, BF16: 2, FP64: 8}


def cost_of(edit: Edit, ops: Sequence[OpCall]) -> FixCost | None:
    """Return the shares of the forward's multiply-adds and output bytes that move to fp32; None if none do."""
    singles = flatten((edit,))
    forward = [op for op in ops if op.phase != "backward"]
    widened = [op for op in forward if is_low(op) and any(widens(single, op) for single in singles)]
    if not widened:
        return None
    all_work, all_bytes = sum(map(_work, forward)), sum(map(_bytes, forward))
    return FixCost(
        products_in_fp32=sum(map(_work, widened)) / all_work if all_work else 0.0,
        more_activations=sum(map(_bytes, widened)) / all_bytes if all_bytes else 0.0,
    )


def _bytes(op: OpCall) -> int:
    return sum(made.numel * _NUM_BYTES.get(made.dtype, 4) for made in op.outputs) if op.op not in MOVES else 0


def _work(op: OpCall) -> float:
    """Return the multiply-adds of a product; those of a plain matrix product if the length of its sums is unknown."""
    if op.op not in PRODUCTS:
        return 0.0
    made = sum(stats.numel for stats in op.outputs[:1])
    taken = {tensor.name: tensor.stats for tensor in op.inputs if tensor.stats is not None}
    factors = [stats.numel for name, stats in taken.items() if is_factor(op.op, name)]
    try:
        terms = num_terms(op.op, taken)
    except KeyError:  # a factor without statistics
        terms = None
    return made * terms if terms is not None else math.sqrt(made * math.prod(factors))
