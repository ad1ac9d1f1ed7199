"""The saved arrays that a replay is compared with, and what their values tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BITS_OF_ANY = 5
"""bf16 has 8 significant bits; a value rounded to 8 bits fits 5 with a chance of one in eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOutputs:
    """The `names` of the arrays that are not inputs, and `graded`, the name and values of the one to compare with.

    `field` is the user's name for the matching field of the model's output, or its exact place there if the recorder
    noted it. If no name shows which is the output, one of `perhaps`, which nothing else claims, counts as it if the
    replay agrees; and one of `read`, which the loss reads by name, if the output has a field of that name.
    """

    names: tuple[str, ...]
    graded: tuple[str, torch.Tensor] | None = None
    field: str | None = None
    perhaps: tuple[tuple[str, torch.Tensor], ...] = ()
    read: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def array(self) -> torch.Tensor | None:
        """The saved array to compare with; None if there is none, or only a single number."""
        return self.graded[1] if self.graded is not None and self.graded[0] in self.names else None


def is_flags(array: torch.Tensor) -> bool:
    """Return True if an array holds only zeros and ones."""
    return bool(((array == 0) | (array == 1)).all())


def are_round(values: torch.Tensor) -> torch.Tensor:
    """Return a mask of the values that fit so few bits, as zeros and counts do, that they do not show their format."""
    fractions: torch.Tensor = torch.frexp(values.double())[0]
    return torch.eq((fractions * 2**_BITS_OF_ANY) % 1, 0)
