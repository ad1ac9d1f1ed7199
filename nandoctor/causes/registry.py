"""Every cause by its code: the pages that `nandoctor explain` prints.

In: the docstrings of the rules, which have fixed sections. Out: `Page`s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from types import ModuleType

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
    optimizer_eps_underflow,
    poisoned_buffers,
    poisoned_input,
    poisoned_target,
    poisoned_weights,
    reduction_overflow,
    silent_overflow,
    where_gradient_trap,
)
from nandoctor.errors import NanDoctorError

SECTIONS = ("What it is", "Evidence it needs", "Why it happens", "Fix", "Known problems")

RULES: tuple[ModuleType, ...] = (
    matmul_overflow,
    elementwise_overflow,
    reduction_overflow,
    exp_overflow,
    input_cast_overflow,
    mask_constant_overflow,
    eps_underflow,
    log_of_zero,
    fully_masked_softmax,
    division_by_zero,
    empty_reduction,
    invalid_domain,
    indeterminate_form,
    silent_overflow,
    gradient_singularity,
    where_gradient_trap,
    gradient_overflow,
    loss_scale_overflow,
    poisoned_weights,
    poisoned_buffers,
    poisoned_input,
    poisoned_target,
    optimizer_eps_underflow,
)
"""In the order of the published list of codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is known about one cause; `sections` are headings, as in `SECTIONS`, each with its paragraph."""

    code: str
    title: str
    summary: str
    sections: tuple[tuple[str, str], ...]


def list_pages() -> tuple[Page, ...]:
    """All pages, in the order of the published list."""
    return tuple(map(_read_page, RULES))


def find_page(code: str) -> Page:
    """The page of one cause.

    Raises:
        NanDoctorError: there is no such code; the remedy names those that are near.
    """
    by_code = {rule.CODE: rule for rule in RULES}
    if code in by_code:
        return _read_page(by_code[code])
    near = [name for name in by_code if code and code in name] or get_close_matches(code, by_code, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    raise NanDoctorError(f"There is no cause {code!r}.", remedy=f"{guess}`nandoctor explain` lists all of them.")


def _read_page(rule: ModuleType) -> Page:
    assert rule.__doc__ is not None
    first, *lines = rule.__doc__.splitlines()
    return Page(
        code=rule.CODE,
        title=rule.TITLE,
        summary=first.removeprefix(f"{rule.CODE}: "),
        sections=tuple(_read_sections(lines)),
    )


def _read_sections(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The headings, at the margin, and the indented lines below each as one paragraph."""
    starts = [index for index, line in enumerate(lines) if line in SECTIONS]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start], " ".join(line.strip() for line in lines[start + 1 : end]).strip()
