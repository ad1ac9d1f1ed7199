"""The corpus on which diagnoses are judged: sick models of every mechanism, their healthy twins, and decoys.

In: nothing. Out: `all_cases()`, `healthy_models()`, and the variants `renamed` and `decoyed`.
"""

from sick_models import (
    backwards,
    branches,
    decoys,
    domains,
    epsilons,
    exponentials,
    gradients,
    masks,
    products,
    ratios,
    squares,
    states,
    sums,
)
from sick_models.case import LOSS, Case
from sick_models.variants import decoyed, renamed

__all__ = ["LOSS", "Case", "all_cases", "decoyed", "healthy_models", "renamed"]

FAMILIES = (
    products, branches, squares, sums, exponentials, masks, epsilons, ratios, domains, gradients, backwards, states
)  # fmt: skip


def all_cases() -> tuple[Case, ...]:
    """Every sick model, in the order of the table of mechanisms."""
    return tuple(case for family in FAMILIES for case in family.CASES)


def healthy_models() -> tuple[Case, ...]:
    """Models that look ill and are not; the twins of the sick ones are had from `Case.twin`."""
    return decoys.HEALTHY
