"""Keeps the buffers as they were before a forward, at the cost of copying only those that the forward writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nandoctor.torch_compat import buffers_of, copy_tensors, is_running_norm, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The buffers before one forward: each itself with its version, and copies of those known to be written."""

    buffers: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]
    copies: dict[int, torch.Tensor]

    def changed(self) -> list[int]:
        """Which buffers were written to in place since."""
        now = tuple([None if buffer is None else version_of(buffer) for buffer in self.buffers])
        return [i for i, version in enumerate(now) if version != self.versions[i]] if now != self.versions else []


class BufferKeeper:
    """Knows which buffers of a model a forward writes: the running statistics of norms, and whatever it saw change.

    The first snapshot copies all buffers, since nothing was seen yet.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(path, module, name) for path, module in model.named_modules() for name in buffers_of(module)]
        self.names = tuple(f"{path}.{name}" if path else name for path, _, name in places)
        self._places = [(buffers_of(module), name) for _, module, name in places]
        self._written = {i for i, (_, module, _) in enumerate(places) if is_running_norm(module)}
        self._unseen = True

    def keep(self) -> Snapshot:
        """The buffers as they are now."""
        buffers = tuple([registry.get(name) for registry, name in self._places])
        versions = tuple([None if buffer is None else version_of(buffer) for buffer in buffers])
        # Inference tensors count no versions, so that nobody can tell whether one was written.
        uncounted = [index for index, version in enumerate(versions) if version is None]
        wanted = range(len(buffers)) if self._unseen else sorted({*self._written, *uncounted})
        sources = {index: buffer for index in wanted if (buffer := buffers[index]) is not None}
        copies = [torch.empty_like(buffer) for buffer in sources.values()]
        if copies:
            with torch.no_grad():
                copy_tensors(copies, list(sources.values()))
        self._unseen = False
        return Snapshot(buffers=buffers, versions=versions, copies=dict(zip(sources, copies, strict=True)))

    def learn(self, snapshot: Snapshot) -> None:
        """See what the forward after this snapshot wrote."""
        self._written.update(snapshot.changed())

    def state(self, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The buffers of a snapshot by name, and the names of those that were overwritten and not copied."""
        state = {name: buffer for name, buffer in zip(self.names, snapshot.buffers, strict=True) if buffer is not None}
        state |= {self.names[index]: copy for index, copy in snapshot.copies.items()}
        lost = [self.names[index] for index in snapshot.changed() if index not in snapshot.copies]
        return state, lost
