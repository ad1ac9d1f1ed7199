"""Change the batch: leave samples out."""

from __future__ import annotations

from typing import Literal

from nandoctor.evidence.edits import SingleEdit, kind_of_change


@kind_of_change
class KeepSamples(SingleEdit):
    """Run with only these samples of the batch, to see what they do without the others."""

    kind: Literal["keep-samples"] = "keep-samples"
    samples: tuple[int, ...]
