"""What half precision and mixed precision make of a module's eps, as far as its layer alone can tell."""

from __future__ import annotations

from nandoctor.evidence.formats import FP16
from nandoctor.evidence.report import EpsUse
from nandoctor.evidence.rounding import RoundedConstant, round_constant
from nandoctor.ops import EPS_IN_FP32, EPS_IN_INPUT, ROOT_IN_INPUT, RUN_IN_FP32
from nandoctor.text import percent

OUTLOOK = (
    "Half precision (model.half()) computes in fp16 throughout: a constant is what fp16 makes of it, but in torch's "
    "own norms. Mixed precision (autocast) runs norms, softmax, log, pow and sums in fp32; adds, divides and roots "
    "keep the format that they get: there the line that uses the constant decides, and a replay tells: --dump DUMP."
)


def in_half_precision(use: EpsUse) -> str:
    """After `model.half()`: CUDA's norms add their eps in fp32 even then, and no other op does."""
    if use.op in ROOT_IN_INPUT and use.value**-0.5 >= FP16.overflow_threshold:
        return "1/root overflows"
    return "fine: fp32" if use.op in EPS_IN_FP32 else describe_rounding(round_constant(use.value, FP16))


def in_mixed_precision(use: EpsUse) -> str:
    """Under fp16 autocast, whose lists decide for torch's own layers; for others the line that uses it does."""
    if use.op in EPS_IN_FP32 | RUN_IN_FP32:
        return "fine: fp32"
    return "as .half()" if use.op in EPS_IN_INPUT else "see --dump"


def describe_rounding(rounded: RoundedConstant) -> str:
    """What is left of the number: "zero", "subnormal, 6.6 % off"."""
    if rounded.effect in ("zero", "overflow"):
        return {"zero": "zero", "overflow": "overflows"}[rounded.effect]
    if rounded.rel_err == 0:
        return "exact" if rounded.effect == "normal" else "subnormal, exact"
    off = f"{percent(rounded.rel_err)} off"
    return f"{'rounded' if rounded.effect == 'normal' else 'subnormal'}, {off}"
