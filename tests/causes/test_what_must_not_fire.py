"""The rules that are easiest to fool, each with what it must see and what it must leave in peace."""

from __future__ import annotations

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


class TestEpsUnderflow:
    def ratio(self, eps, *, sum_of=(0.0, 2.0), dtype=FP16, denominator="other"):
        """x / (norm + eps), or (norm + eps) / x."""
        recipe = Recipe()
        guarded = recipe.op("add", sum_of, made=sum_of, dtype=dtype, alpha=1.0, other=eps)
        if denominator == "other":
            recipe.op("div", (0.0, 1.0), guarded, made=(NAN, 1.0))
        else:
            recipe.op("div", guarded, (0.0, 1.0), made=(NAN, 1.0))
        return recipe

    def test_an_eps_that_is_zero_in_fp16(self):
        cause = eps_underflow.diagnose(self.ratio(1e-8).finding())
        assert cause is not None
        assert cause.evidence[0].value == 1e-8
        assert "rounds to zero" in cause.explanation

    def test_not_where_fp32_divides_by_zero_as_well(self):
        assert eps_underflow.diagnose(self.ratio(1e-8).finding(reference_is_finite=False)) is None

    def test_not_for_an_eps_that_the_format_holds(self):
        assert eps_underflow.diagnose(self.ratio(1e-5).finding()) is None
        assert eps_underflow.diagnose(self.ratio(1e-8, dtype=FP32).finding()) is None

    def test_not_for_an_eps_that_no_zero_needed(self):
        assert eps_underflow.diagnose(self.ratio(1e-8, sum_of=(0.5, 2.0)).finding()) is None

    def test_not_for_an_eps_above_the_line(self):
        assert eps_underflow.diagnose(self.ratio(1e-8, denominator="self").finding()) is None

    def test_not_for_a_large_constant(self):
        assert eps_underflow.diagnose(self.ratio(0.5).finding()) is None

    def test_not_for_an_op_that_is_nowhere_singular(self):
        recipe = self.ratio(1e-8)
        recipe.op("mul", 1, made=(NAN,))
        assert eps_underflow.diagnose(recipe.finding()) is None

    def saturated(self, *between):
        """log(1 - clamp(p, 1e-5, 1 - 1e-5)), with ops between the clamp and the subtraction."""
        recipe = Recipe()
        last = recipe.op("clamp", (0.0, 1.0), made=(1e-5, 1.0), min=1e-5, max=0.99999)
        for name in between:
            last = recipe.op(name, last, made=(1e-5, 1.0))
        rest = recipe.op("rsub", last, made=(0.0, 1.0), other=1.0)
        recipe.op("log", rest, made=(-INF, 0.0))
        return recipe

    @pytest.mark.parametrize("between", [(), ("view", "to")])
    def test_an_eps_that_one_absorbs(self, between):
        cause = eps_underflow.diagnose(self.saturated(*between).finding())
        assert "absorbed" in cause.explanation

    def test_not_for_the_eps_of_a_norm_far_behind_a_sigmoid(self):
        assert eps_underflow.diagnose(self.saturated("sigmoid").finding()) is None

    def test_a_derivative_that_fp32_has_too_is_none_of_its_business(self):
        recipe = self.ratio(1e-8)
        finding = gradient_finding(recipe, 1, incoming=(1.0,), outgoing=(INF,), reference_is_finite=False)
        assert eps_underflow.diagnose(finding) is None


class TestMaskConstantOverflow:
    def filled(self, value, *, op="masked_fill", made=(1.0, -INF), other=(0.0, 3.0)):
        recipe = Recipe()
        recipe.op(op, other, made=made, value=value)
        return recipe

    def test_minus_one_billion_in_fp16(self):
        cause = mask_constant_overflow.diagnose(self.filled(-1e9).finding(exact=1e9))
        assert cause is not None
        assert "-1e9" in cause.explanation

    def test_not_for_an_infinity_that_was_written(self):
        assert mask_constant_overflow.diagnose(self.filled(-INF).finding()) is None

    def test_not_for_a_constant_that_fits(self):
        assert mask_constant_overflow.diagnose(self.filled(-6e4).finding()) is None

    def test_not_for_a_positive_overflow(self):
        assert mask_constant_overflow.diagnose(self.filled(-1e9, made=(1.0, INF)).finding(exact=1e9)) is None

    def test_a_mask_of_zeros_and_ones_times_a_constant(self):
        recipe = self.filled(-1e9, op="mul", other=(0.0, 1.0))
        assert mask_constant_overflow.diagnose(recipe.finding(exact=1e9)) is not None

    def test_not_for_activations_times_a_constant(self):
        recipe = self.filled(-2e4, op="mul", other=(0.0, 5.0))
        assert mask_constant_overflow.diagnose(recipe.finding(exact=1e5)) is None

    def test_two_masks_at_the_limit_added(self):
        recipe, limit = Recipe(), -3.4028234663852886e38
        recipe.op("add", (0.0, limit), (0.0, limit), made=(0.0, -INF), dtype=FP32)
        assert mask_constant_overflow.diagnose(recipe.finding(exact=6.8e38)) is not None

    def test_not_for_the_sum_of_two_streams(self):
        recipe = Recipe()
        recipe.op("add", (-5e4, 2.0), (-5e4, 1.0), made=(-INF, 3.0))
        assert mask_constant_overflow.diagnose(recipe.finding(exact=1e5)) is None


class TestExpOverflow:
    def gate(self, exponential, other, *, through="to"):
        recipe = Recipe()
        grown = recipe.op("exp", (0.1, 12.0), made=exponential, dtype=FP32)
        moved = recipe.op(through, grown, made=exponential)
        recipe.op("mul", moved, other, made=(INF, 1.0))
        return recipe

    def test_an_exponential_that_does_not_fit(self):
        recipe = Recipe()
        recipe.op("exp", (1.0, 90.0), made=(2.0, INF), dtype=FP32)
        assert exp_overflow.diagnose(recipe.finding(exact=1e39)) is not None

    def test_a_product_with_a_large_exponential(self):
        cause = exp_overflow.diagnose(self.gate((1.0, 6e4), (0.0, 20.0)).finding(exact=1.2e6))
        assert cause.evidence[-1].value == 12.0

    def test_not_where_the_other_factor_is_the_large_one(self):
        assert exp_overflow.diagnose(self.gate((1.0, 3.0), (0.0, 6e4)).finding(exact=1.8e5)) is None

    def test_not_behind_an_op_that_computes(self):
        assert exp_overflow.diagnose(self.gate((1.0, 6e4), (0.0, 20.0), through="mul").finding(exact=1.2e6)) is None

    def test_not_for_a_square(self):
        recipe = Recipe()
        recipe.op("pow", (1.0, 300.0), made=(1.0, INF), exponent=2.0)
        assert exp_overflow.diagnose(recipe.finding(exact=9e4)) is None

    def test_not_for_a_matrix_product_of_exponentials(self):
        recipe = Recipe()
        grown = recipe.op("exp", (1.0, 10.0), made=(1.0, 2e4))
        recipe.op("matmul", grown, (1.0, 2.0), made=(INF,))
        assert exp_overflow.diagnose(recipe.finding(exact=1e5)) is None

    def test_not_where_float64_is_infinite_for_another_reason(self):
        recipe = Recipe()
        recipe.op("exp", (INF, 1.0), made=(INF, 2.0))
        assert exp_overflow.diagnose(recipe.finding(had_inf_input=True)) is None


class TestReductionOverflow:
    def product(self, op, factor, *, source="op", length=8, exact=1e5):
        recipe = Recipe()
        recipe.op(op, (3.0, 2e4), factor, made=(INF, 1.0), source=source)
        return recipe.finding(exact=exact, length=length)

    def test_a_variance_that_does_not_fit(self):
        recipe = Recipe()
        recipe.op("var", (1.0, 400.0), made=(INF,))
        assert reduction_overflow.diagnose(recipe.finding(exact=8e4, length=64)) is not None

    def test_a_product_with_ones_is_a_sum(self):
        assert reduction_overflow.diagnose(self.product("matmul", (1.0, 1.0))) is not None

    def test_not_for_any_other_product(self):
        assert reduction_overflow.diagnose(self.product("matmul", (1.0, 2.0))) is None
        assert reduction_overflow.diagnose(self.product("matmul", (0.0, 0.0))) is None

    def test_not_for_a_layer_on_a_blank_image(self):
        assert reduction_overflow.diagnose(self.product("conv2d", (1.0, 1.0), source="weight")) is None

    def test_not_for_a_product_of_one_term(self):
        assert reduction_overflow.diagnose(self.product("matmul", (1.0,), length=1)) is None

    def test_not_where_float64_has_no_finite_value_either(self):
        recipe = Recipe()
        recipe.op("mean", (1.0,), made=(NAN,))
        assert reduction_overflow.diagnose(recipe.finding()) is None


class TestWhereGradientTrap:
    def finding(self, outgoing=(NAN, 1.0), *, selected=True):
        recipe = Recipe()
        last = recipe.op("log", (0.0, 1.0), made=(-INF, 0.0))
        recipe.op("where", last, made=(0.0, 0.0))
        finding = gradient_finding(recipe, 0, incoming=(0.0, 1.0), outgoing=outgoing)
        return replace(finding, discarded_by=finding.ops[1] if selected else None)

    def test_zero_gradients_of_a_where_meet_an_infinite_derivative(self):
        assert where_gradient_trap.diagnose(self.finding()) is not None

    def test_not_without_a_selection(self):
        assert where_gradient_trap.diagnose(self.finding(selected=False)) is None

    def test_not_for_an_infinity(self):
        assert where_gradient_trap.diagnose(self.finding((INF, 1.0))) is None


class TestElementwiseOverflow:
    def made(self, *operands, result, name="mul", given_inf=False, **scalars):
        recipe = Recipe()
        recipe.op(name, *operands, made=result, dtype=FP64, **scalars)
        return elementwise_overflow.diagnose(recipe.finding(reference_is_finite=False, had_inf_input=given_inf))

    def test_a_product_that_float64_does_not_hold_either(self):
        cause = self.made((3e38, 1.0), (3e38, 1.0), result=(INF, 1.0))
        assert cause.headline == "mul in block is too large even for float64"

    def test_not_for_infinities_that_were_given_or_written(self):
        assert self.made((INF, 1.0), (3e38, 1.0), result=(INF, 1.0), given_inf=True) is None
        assert self.made((1.0, 1.0), result=(INF, INF), other=INF) is None

    def test_not_for_a_nan_or_a_pole(self):
        assert self.made((3e38, 1.0), (3e38, 1.0), result=(NAN, 1.0)) is None
        assert self.made((0.0, 1.0), result=(INF, 1.0), name="reciprocal") is None


class TestGradientSingularity:
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
    def test_infinite_only_where_the_argument_may_be_at_the_point(self, op, argument, told):
        recipe = Recipe()
        recipe.op(op, argument)
        finding = gradient_finding(recipe, 0, incoming=(1.0, 1.0), outgoing=(INF, 1.0))
        assert told in gradient_singularity.diagnose(finding).headline
