"""What a dump says went wrong in its step, beside the values that it saved.

In: what the reader found. Out: `SavedFlags`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFlags:
    """The loss that was non-finite, as the file has it (None: none was), and whether gradients were.

    `rank` of `num_ranks` wrote the file. `here` is False where the non-finite loss was another rank's.
    """

    loss: float | None = None
    gradients: bool = False
    here: bool = True
    rank: int = 0
    num_ranks: int = 1
