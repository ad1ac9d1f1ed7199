"""Conclusions from traces: pure functions over plain data, without a tensor in sight.

In: the traces of the runs. Out: what came first, where it was born, why, and the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nandoctor.causes import (
    division_by_zero,
    elementwise_overflow,
    empty_reduction,
    eps_underflow,
    exp_overflow,
    fully_masked_softmax,
    gradient_overflow,
    gradient_singularity,
    indeterminate_form,
    input_cast_overflow,
    invalid_domain,
    log_of_zero,
    loss_scale_overflow,
    mask_constant_overflow,
    matmul_overflow,
    reduction_overflow,
    where_gradient_trap,
)
from nandoctor.causes.base import Candidate, Finding, GradientFinding
from nandoctor.evidence.report import Cause

FORWARD_RULES: tuple[Callable[[Finding], Cause | None], ...] = (
    mask_constant_overflow.diagnose,
    input_cast_overflow.diagnose,
    eps_underflow.diagnose,
    fully_masked_softmax.diagnose,
    exp_overflow.diagnose,
    reduction_overflow.diagnose,
    matmul_overflow.diagnose,
    elementwise_overflow.diagnose,
    invalid_domain.diagnose,
    log_of_zero.diagnose,
    division_by_zero.diagnose,
    empty_reduction.diagnose,
    indeterminate_form.diagnose,
    invalid_domain.diagnose_pole,
)
"""For the forward pass and the loss; the first that can decide names the cause."""

BACKWARD_RULES: tuple[Callable[[GradientFinding], Cause | None], ...] = (
    loss_scale_overflow.diagnose,
    where_gradient_trap.diagnose,
    eps_underflow.diagnose_gradient,
    indeterminate_form.diagnose_gradient,
    gradient_overflow.diagnose,
    gradient_singularity.diagnose,
)
"""For the backward pass, likewise."""

SUGGESTIONS: Mapping[str, Callable[[Any], Iterable[Candidate]]] = {
    rule.CODE: rule.suggest
    for rule in (
        division_by_zero,
        empty_reduction,
        eps_underflow,
        exp_overflow,
        fully_masked_softmax,
        gradient_singularity,
        indeterminate_form,
        invalid_domain,
        log_of_zero,
        loss_scale_overflow,
        mask_constant_overflow,
        matmul_overflow,
        where_gradient_trap,
    )
}
"""By cause, the changes of the operation itself that are worth trying; they take the finding that was diagnosed."""
