"""Change the batch: leave samples out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nandoctor.changes.setting import WHOLE
from nandoctor.evidence.edits import SingleEdit, Snippet, kind_of_change

_SELECTING = """\
kept, size = {kept}, {size}


def select(value):
    if isinstance(value, dict):
        return {{key: select(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [select(item) for item in value]
    return value[kept] if torch.is_tensor(value) and value.shape[:1] == (size,) else value


batch = select(batch)
"""


@kind_of_change
class KeepSamples(SingleEdit):
    """Run with only these of the batch's `num_samples`, along dimension 0 of every array that has it."""

    size: ClassVar[int] = 2 * WHOLE

    kind: Literal["keep-samples"] = "keep-samples"
    samples: tuple[int, ...]
    num_samples: int | None = None

    @property
    def title(self) -> str:
        """What is left out."""
        return "Leave the affected samples out of the batch"

    def snippet(self, model: Any) -> Snippet:
        """Return lines that select the samples in each array of the batch that has one row for each."""
        text = _SELECTING.format(kept=list(self.samples), size=self.num_samples)
        return Snippet(kind="data", text=text, takes_samples=True)
