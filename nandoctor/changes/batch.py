"""Change the batch: leave samples out, or fill what a mask hides."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from nandoctor.changes.setting import WHOLE
from nandoctor.evidence.edits import SingleEdit, Snippet, kind_of_change


@kind_of_change
class KeepSamples(SingleEdit):
    """Run with only these samples of the batch, along dimension 0 of every array that has it."""

    size: ClassVar[int] = 2 * WHOLE

    kind: Literal["keep-samples"] = "keep-samples"
    samples: tuple[int, ...]

    @property
    def title(self) -> str:
        """What is left out."""
        return "Leave the affected samples out of the batch"

    def snippet(self, model: Any) -> Snippet:
        """Return lines that select the samples in each array that is as long as the longest."""
        text = (
            f"kept = {list(self.samples)}\n"
            "size = max(len(value) for value in batch.values() if value.dim())\n"
            "for name, value in batch.items():\n"
            "    if value.dim() and len(value) == size:\n"
            "        batch[name] = value[kept]\n"
        )
        return Snippet(kind="data", text=text, takes_samples=True)


@kind_of_change
class FillMasked(SingleEdit):
    """Set an array of the batch to 0 where its `mask`, another array, is 0: it is multiplied by 0 there anyway."""

    size: ClassVar[int] = 2 * WHOLE - 1
    is_text_alone: ClassVar[bool] = True

    kind: Literal["fill-masked"] = "fill-masked"
    array: str
    mask: str

    @property
    def title(self) -> str:
        """The array and its mask."""
        return f"Put 0 into {self.array} wherever {self.mask} is 0, before the arithmetic"

    def snippet(self, model: Any) -> Snippet:
        """Return the line that fills the array."""
        array, mask = map(json.dumps, (self.array, self.mask))
        return Snippet(kind="data", text=f"batch[{array}] = batch[{array}].masked_fill(batch[{mask}] == 0, 0.0)\n")
