"""The rules that are easiest to fool, each with what it must see and what it must leave in peace."""

from dataclasses import replace

import pytest
from made_findings import INF, NAN, Recipe, gradient_finding

from nandoctor.causes import (
    elementwise_overflow,
    eps_underflow,
    exp_overflow,
    gradient_singularity,
    mask_constant_overflow,
    reduction_overflow,
    where_gradient_trap,
)
from nandoctor.evidence.formats import FP16, FP32, FP64


def one(name, *operands, made, dtype=FP16, source="op", **scalars):
    """A single op."""
    recipe = Recipe()
    recipe.op(name, *operands, made=made, dtype=dtype, source=source, **scalars)
    return recipe


def ratio(eps, *, sum_of=(0.0, 2.0), dtype=FP16, above=False):
    """x / (norm + eps), or (norm + eps) / x."""
    recipe = Recipe()
    guarded = recipe.op("add", sum_of, made=sum_of, dtype=dtype, alpha=1.0, other=eps)
    operands = (guarded, (0.0, 1.0)) if above else ((0.0, 1.0), guarded)
    recipe.op("div", *operands, made=(NAN, 1.0))
    return recipe


def times_after(recipe):
    recipe.op("mul", 1, made=(NAN,))
    return recipe


def saturated(*between):
    """log(1 - clamp(p, 1e-5, 1 - 1e-5)), with ops between the clamp and the subtraction."""
    recipe = Recipe()
    last = recipe.op("clamp", (0.0, 1.0), made=(1e-5, 1.0), min=1e-5, max=0.99999)
    for name in between:
        last = recipe.op(name, last, made=(1e-5, 1.0))
    rest = recipe.op("rsub", last, made=(0.0, 1.0), other=1.0)
    recipe.op("log", rest, made=(-INF, 0.0))
    return recipe


def filled(value, *, op="masked_fill", made=(1.0, -INF), other=(0.0, 3.0)):
    return one(op, other, made=made, value=value)


def gate(exponential, other, *, through="to"):
    recipe = Recipe()
    grown = recipe.op("exp", (0.1, 12.0), made=exponential, dtype=FP32)
    moved = recipe.op(through, grown, made=exponential)
    recipe.op("mul", moved, other, made=(INF, 1.0))
    return recipe


def product_of_exponentials():
    recipe = Recipe()
    grown = recipe.op("exp", (1.0, 10.0), made=(1.0, 2e4))
    recipe.op("matmul", grown, (1.0, 2.0), made=(INF,))
    return recipe


def product(op, factor, *, source="op"):
    return one(op, (3.0, 2e4), factor, made=(INF, 1.0), source=source)


LIMIT = -3.4028234663852886e38
FAILS_TOO, LONG = {"reference_is_finite": False}, {"exact": 1e5, "length": 8}

SEEN = {
    "an eps that is zero in fp16": (eps_underflow, ratio(1e-8), {}, "rounds to zero"),
    "an eps that one absorbs": (eps_underflow, saturated(), {}, "absorbed"),
    "an eps that one absorbs, moved": (eps_underflow, saturated("view", "to"), {}, "absorbed"),
    "minus one billion in fp16": (mask_constant_overflow, filled(-1e9), {"exact": 1e9}, "-1e9"),
    "a mask times a constant": (mask_constant_overflow, filled(-1e9, op="mul", other=(0.0, 1.0)), {"exact": 1e9}, ""),
    "two masks at the limit": (
        mask_constant_overflow,
        one("add", (0.0, LIMIT), (0.0, LIMIT), made=(0.0, -INF), dtype=FP32),
        {"exact": 6.8e38},
        "",
    ),
    "an exponential": (exp_overflow, one("exp", (1.0, 90.0), made=(2.0, INF), dtype=FP32), {"exact": 1e39}, ""),
    "a product with an exponential": (exp_overflow, gate((1.0, 6e4), (0.0, 20.0)), {"exact": 1.2e6}, "12"),
    "a variance": (reduction_overflow, one("var", (1.0, 400.0), made=(INF,)), {"exact": 8e4, "length": 64}, ""),
    "a product past float64": (
        elementwise_overflow,
        one("mul", (3e38, 1.0), (3e38, 1.0), made=(INF, 1.0), dtype=FP64),
        FAILS_TOO,
        "too large even for float64",
    ),
}
LEFT_IN_PEACE = {
    "where fp32 divides by zero as well": (eps_underflow, ratio(1e-8), FAILS_TOO),
    "an eps that fp16 holds": (eps_underflow, ratio(1e-5), {}),
    "an eps that fp32 holds": (eps_underflow, ratio(1e-8, dtype=FP32), {}),
    "an eps that no zero needed": (eps_underflow, ratio(1e-8, sum_of=(0.5, 2.0)), {}),
    "an eps above the line": (eps_underflow, ratio(1e-8, above=True), {}),
    "a large constant": (eps_underflow, ratio(0.5), {}),
    "an op that is nowhere singular": (eps_underflow, times_after(ratio(1e-8)), {}),
    "the eps of a norm far behind a sigmoid": (eps_underflow, saturated("sigmoid"), {}),
    "an infinity that was written": (mask_constant_overflow, filled(-INF), {}),
    "a constant that fits": (mask_constant_overflow, filled(-6e4), {}),
    "a positive overflow": (mask_constant_overflow, filled(-1e9, made=(1.0, INF)), {"exact": 1e9}),
    "activations times a constant": (
        mask_constant_overflow,
        filled(-2e4, op="mul", other=(0.0, 5.0)),
        {"exact": 1e5},
    ),
    "the sum of two streams": (
        mask_constant_overflow,
        one("add", (-5e4, 2.0), (-5e4, 1.0), made=(-INF, 3.0)),
        {"exact": 1e5},
    ),
    "another factor that is the large one": (exp_overflow, gate((1.0, 3.0), (0.0, 6e4)), {"exact": 1.8e5}),
    "an op that computes between": (
        exp_overflow,
        gate((1.0, 6e4), (0.0, 20.0), through="mul"),
        {"exact": 1.2e6},
    ),
    "a square": (exp_overflow, one("pow", (1.0, 300.0), made=(1.0, INF), exponent=2.0), {"exact": 9e4}),
    "a matrix product of exponentials": (exp_overflow, product_of_exponentials(), {"exact": 1e5}),
    "an exponential of Inf": (exp_overflow, one("exp", (INF, 1.0), made=(INF, 2.0)), {}),
    "any other product": (reduction_overflow, product("matmul", (1.0, 2.0)), LONG),
    "a product with zeros": (reduction_overflow, product("matmul", (0.0, 0.0)), LONG),
    "a layer on a blank image": (reduction_overflow, product("conv2d", (1.0, 1.0), source="weight"), LONG),
    "a product of one term": (reduction_overflow, product("matmul", (1.0,)), {"exact": 1e5, "length": 1}),
    "no finite value in float64 either": (reduction_overflow, one("mean", (1.0,), made=(NAN,)), {}),
    "infinities that were given": (
        elementwise_overflow,
        one("mul", (INF, 1.0), (3e38, 1.0), made=(INF, 1.0), dtype=FP64),
        FAILS_TOO,
    ),
    "infinities that were written": (
        elementwise_overflow,
        one("mul", (1.0, 1.0), made=(INF, INF), dtype=FP64, other=INF),
        FAILS_TOO,
    ),
    "a NaN": (elementwise_overflow, one("mul", (3e38, 1.0), (3e38, 1.0), made=(NAN, 1.0), dtype=FP64), FAILS_TOO),
    "a pole": (elementwise_overflow, one("reciprocal", (0.0, 1.0), made=(INF, 1.0), dtype=FP64), FAILS_TOO),
}


@pytest.mark.parametrize("what", SEEN)
def test_what_a_rule_must_see(what):
    rule, recipe, known, said = SEEN[what]
    cause = rule.diagnose(recipe.finding(**known))
    assert said in " ".join([cause.headline, cause.explanation, *(str(item.value) for item in cause.evidence)])


@pytest.mark.parametrize("what", LEFT_IN_PEACE)
def test_what_a_rule_must_leave_in_peace(what):
    rule, recipe, known = LEFT_IN_PEACE[what]
    assert rule.diagnose(recipe.finding(**known)) is None


def test_a_derivative_that_fp32_has_too_is_no_matter_of_an_eps():
    finding = gradient_finding(ratio(1e-8), 1, incoming=(1.0,), outgoing=(INF,), reference_is_finite=False)
    assert eps_underflow.diagnose(finding) is None


@pytest.mark.parametrize(
    ("outgoing", "selected", "seen"), [((NAN, 1.0), True, True), ((NAN, 1.0), False, False), ((INF, 1.0), True, False)]
)
def test_zero_gradients_of_a_where_meet_an_infinite_derivative(outgoing, selected, seen):
    recipe = Recipe()
    last = recipe.op("log", (0.0, 1.0), made=(-INF, 0.0))
    recipe.op("where", last, made=(0.0, 0.0))
    finding = gradient_finding(recipe, 0, incoming=(0.0, 1.0), outgoing=outgoing)
    finding = replace(finding, discarded_by=finding.ops[1] if selected else None)
    assert (where_gradient_trap.diagnose(finding) is not None) == seen


@pytest.mark.parametrize(
    ("op", "argument", "told"),
    [
        ("reciprocal", (1e-25, 1.0), "too large even for fp32"),
        ("log", (1e-38, 1.0), "too large even for fp32"),
        ("acos", (-0.5, 0.5), "too large even for fp32"),
        ("reciprocal", (0.0, 1.0), "is infinite"),
        ("reciprocal", (-1.0, 1.0), "is infinite"),
        ("sqrt", (0.0, 1.0), "is infinite at 0"),
        ("acos", (0.5, 1.0), "is infinite"),
        ("cosh", (0.5, 1.0), "is infinite"),
    ],
)
def test_infinite_only_where_the_argument_may_be_at_the_point(op, argument, told):
    recipe = Recipe()
    recipe.op(op, argument)
    finding = gradient_finding(recipe, 0, incoming=(1.0, 1.0), outgoing=(INF, 1.0))
    assert told in gradient_singularity.diagnose(finding).headline
