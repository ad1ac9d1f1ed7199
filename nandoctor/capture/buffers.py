"""Keeps the buffers as they were before a forward, at the cost of copying only those that the forward writes.

In: a model. Out: `Snapshot`s, which become a state dict when one is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nandoctor.dumps.trees import version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The buffers before one forward: each itself with its version, and copies of those known to be written."""

    buffers: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]
    copies: dict[int, torch.Tensor]

    def changed(self) -> list[int]:
        """Which buffers were written to in place since."""
        now = (None if buffer is None else version_of(buffer) for buffer in self.buffers)
        return [index for index, version in enumerate(now) if version != self.versions[index]]


class BufferKeeper:
    """Knows which buffers of a model a forward writes: the running statistics of norms, and whatever it saw change.

    The first snapshot copies all buffers, since nothing was seen yet.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(path, module, name) for path, module in model.named_modules() for name in module._buffers]
        self.names = tuple(f"{path}.{name}" if path else name for path, _, name in places)
        self._places = [(module._buffers, name) for _, module, name in places]
        self._written = {i for i, (_, module, _) in enumerate(places) if isinstance(module, _NormBase)}
        self._unseen = True

    def keep(self) -> Snapshot:
        """The buffers as they are now."""
        buffers = tuple(registry.get(name) for registry, name in self._places)
        wanted = range(len(buffers)) if self._unseen else self._written
        # Inference tensors count no versions, so that nobody can tell whether one was written.
        uncounted = {i for i, buffer in enumerate(buffers) if buffer is not None and buffer.is_inference()}
        indices = [i for i in sorted({*wanted, *uncounted}) if buffers[i] is not None]
        copies = [torch.empty_like(buffer) for i in indices if (buffer := buffers[i]) is not None]
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, [buffer for i in indices if (buffer := buffers[i]) is not None])
        self._unseen = False
        return Snapshot(
            buffers=buffers,
            versions=tuple(None if buffer is None else version_of(buffer) for buffer in buffers),
            copies=dict(zip(indices, copies, strict=True)),
        )

    def learn(self, snapshot: Snapshot) -> None:
        """See what the forward after this snapshot wrote."""
        self._written.update(snapshot.changed())

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The buffers of a snapshot by name, and the names of those that were overwritten and not copied."""
        state = {name: buffer for name, buffer in zip(self.names, snapshot.buffers, strict=True) if buffer is not None}
        state |= {self.names[index]: copy for index, copy in snapshot.copies.items()}
        lost = [self.names[index] for index in snapshot.changed() if index not in snapshot.copies]
        return state, lost
