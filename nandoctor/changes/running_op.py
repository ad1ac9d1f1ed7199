"""What a run offers to the changes of its ops; this room does not import torch, and tensors have their own methods."""

from __future__ import annotations

from typing import Any, Protocol


class RunningOp(Protocol):
    """An op of a run that has been called, and has not run yet."""

    @property
    def name(self) -> str:
        """The aten name."""

    @property
    def is_mutable(self) -> bool:
        """True if the op writes to one of its arguments."""

    def argument(self, name: str) -> Any:
        """Return an argument by its name in the op's schema, None if it was not given."""

    def number(self, name: str) -> float | None:
        """Return a number among the arguments, None if there is none of this name."""

    def tensors(self) -> list[tuple[str, Any]]:
        """Return the tensors whose values the op reads, those in a list as `name[i]`."""

    def lowest(self) -> float:
        """Return the lowest number of the op's format, that of its first floating-point tensor."""

    def run(self, /, **arguments: Any) -> Any:
        """Run the op with other values for some arguments; a tensor that it writes to is given them in place."""

    def run_in_fp32(self) -> Any:
        """Run the op on operands in fp32 with autocast off."""

    def full_rows(self) -> Any:
        """Return the mask of rows that are -inf throughout, None if the op has no such rows."""


def is_tensor(value: Any) -> bool:
    """Return True for a tensor."""
    return hasattr(value, "masked_fill")
