"""The source text of a logarithm, and stable forms that avoid the exponential inside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nandoctor.changes.text_lines import grouped, negated


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The text of a logarithm; `is_low` if it may be in half precision.

    If it is the logsumexp over `dims` of a text, `terms` is that text; with `dims` None it is the softplus of `terms`.
    `terms` is "" for any other logarithm.
    """

    text: str
    is_low: bool = False
    terms: str = ""
    dims: tuple[str, ...] | None = None

    @property
    def wide(self) -> str:
        """The text cast to fp32, for a function that autocast runs in its input's format."""
        return f"{grouped(self.text)}.float()" if self.is_low else self.text


def even_log(name: str, value: Log) -> Log:
    """Return the log of cosh or the Bessel function I0 of a value; both grow exponentially on either side of 0."""
    if name == "cosh":
        return Log(text=f"torch.logaddexp({value.wide}, {negated(value.wide)}) - {math.log(2):.6f}")
    return Log(text=f"torch.log(torch.special.i0e({value.wide})) + {grouped(value.wide)}.abs()")


def excess_log(exponent: Log) -> Log:
    """Return log(exp(exponent) - 1), the inverse of a softplus."""
    return Log(text=f"{exponent.wide} + torch.log(-torch.expm1({negated(exponent.wide)}))")


def softplus_of(exponent: Log, functional: str) -> Log:
    """Return log(1 + exp(exponent)), a softplus."""
    return Log(text=f"{functional}.softplus({exponent.wide})", terms=exponent.text)


def slope_log(value: Log, functional: str) -> Log:
    """Return log(1 - tanh(value) ** 2), the correction of a squashed action's log density."""
    return Log(text=f"2 * ({math.log(2):.6f} - {value.wide} - {functional}.softplus(-2 * {value.wide}))")


def functional_in(text: str) -> str:
    """Return the name for torch.nn.functional in the text of a file: "F" if it is imported as that."""
    imports = ("import torch.nn.functional as F\n", "from torch.nn import functional as F\n")
    return "F" if any(line in text for line in imports) else "torch.nn.functional"
