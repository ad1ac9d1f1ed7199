"""Mend the buffers that are saved."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nandoctor.evidence.edits import SingleEdit, Snippet, kind_of_change


@kind_of_change
class ResetBuffers(SingleEdit):
    """Reset what is non-finite in buffers: variances to 1, as in a fresh model, all else to 0."""

    is_text_alone: ClassVar[bool] = True

    kind: Literal["reset-buffers"] = "reset-buffers"
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        count = len(self.names)
        return f"Reset the buffer {self.names[0]}" if count == 1 else f"Reset {count} non-finite buffers"

    @property
    def replaces(self) -> str:
        """What other buffers than running statistics have lost: no batch restores it."""
        return "" if self._are_statistics else "what the buffer has lost is 0 now"

    @property
    def _are_statistics(self) -> bool:
        return all(name.rpartition(".")[2].startswith("running_") for name in self.names)

    def snippet(self, model: Any) -> Snippet:
        """Reset buffers by name, unless they are running statistics: another non-finite one may be a mask."""
        if self._are_statistics:
            which = '"running_" in name'
            then = "a few batches in train mode, without an optimizer step, restore the statistics"
        else:
            which = f"name in {list(self.names)}"
            then = "0 is a placeholder for what the model's code, or a checkpoint, puts there"
        text = (
            "for name, buffer in model.named_buffers():\n"
            f"    if {which}:\n"
            '        buffer.data[~buffer.isfinite()] = 1.0 if "var" in name.rpartition(".")[2] else 0.0\n'
            f"# {then}\n"
        )
        return Snippet(kind="state", text=text)
