"""Change the batch: leave samples out."""

from __future__ import annotations

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
