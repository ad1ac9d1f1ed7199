"""Compares the checksums of blamed tensors in a file that is too large to compare all of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nandoctor.dumps.file_type import Container, Member, altered

if TYPE_CHECKING:
    import torch

    from nandoctor.dumps.stored_tensor import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """A file's data, and its members with tensors, by the addresses at which these begin in memory."""

    data: Any = b""
    members: Mapping[int, Member] = field(default_factory=dict)

    @classmethod
    def left(cls, container: Container, values: Values) -> Checksums:
        """Return the checksums that were not compared when the file was opened."""
        return cls() if container.is_checked else cls(data=container.data, members=values.places)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare the checksums of the data that these tensors use.

        Raises:
            DumpError: the data has changed since it was written.
        """
        starts = sorted(self.members)
        names: dict[int, str] = {}  # one tensor per member, which may hold thousands
        for name, tensor in tensors.items() if starts else ():
            address = tensor.data_ptr() if str(tensor.layout) == "torch.strided" else 0
            start = starts[bisect_right(starts, address) - 1]
            if start <= address < start + self.members[start].nbytes:
                names.setdefault(start, name)
        for start, name in names.items():
            if not self.members[start].is_intact(self.data):
                raise altered(repr(name))
