"""The text of one logarithm, and forms that give it without the exponential that it is taken of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nandoctor.fixes.source_expression import grouped, negated


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The text of a logarithm; `is_low` where it may be in half precision.

    It is the logsumexp over `dims` of the text `terms`, or the softplus of it where `dims` is None; "" for any other.
    """

    text: str
    is_low: bool = False
    terms: str = ""
    dims: tuple[str, ...] | None = None

    @property
    def wide(self) -> str:
        """The text in fp32, for a function that autocast leaves in the format of its input."""
        return f"{grouped(self.text)}.float()" if self.is_low else self.text


def even_log(name: str, value: Log) -> Log:
    """The logarithm of a cosh or a Bessel function I0 of a value, which grow like its exponential on both sides."""
    if name == "cosh":
        return Log(text=f"torch.logaddexp({value.wide}, {negated(value.wide)}) - {math.log(2):.6f}")
    return Log(text=f"torch.log(torch.special.i0e({value.wide})) + {grouped(value.wide)}.abs()")


def excess_log(exponent: Log) -> Log:
    """The logarithm of an exponential less 1, of the exponent: the inverse of a softplus."""
    return Log(text=f"{exponent.wide} + torch.log(-torch.expm1({negated(exponent.wide)}))")


def softplus_of(exponent: Log, functional: str) -> Log:
    """The logarithm of 1 and an exponential, of the exponent."""
    return Log(text=f"{functional}.softplus({exponent.wide})", terms=exponent.text)


def slope_log(value: Log, functional: str) -> Log:
    """The logarithm of 1 - tanh(value) ** 2, by which a squashed action's density is corrected."""
    return Log(text=f"2 * ({math.log(2):.6f} - {value.wide} - {functional}.softplus(-2 * {value.wide}))")


def functional_in(text: str) -> str:
    """What torch.nn.functional is called in the text of a file."""
    is_known = any(
        f"{start} as F\n" in text for start in ("import torch.nn.functional", "from torch.nn import functional")
    )
    return "F" if is_known else "torch.nn.functional"
