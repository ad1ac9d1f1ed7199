"""The checksums of a file that is too large to compare all of them: those of the tensors that are to blame are."""

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
    """The data of a file, and the members of it that tensors lie in, by the addresses where those begin in memory."""

    data: Any = b""
    members: Mapping[int, Member] = field(default_factory=dict)

    @classmethod
    def left(cls, container: Container, values: Values) -> Checksums:
        """Those that were not compared when the file was opened."""
        return cls() if container.is_checked else cls(data=container.data, members=values.places)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare those of the data that these tensors show.

        Raises:
            DumpError: it has changed since it was written.
        """
        starts = sorted(self.members)
        names: dict[int, str] = {}  # one of each member, which may hold thousands of tensors
        for name, tensor in tensors.items() if starts else ():
            address = tensor.data_ptr() if str(tensor.layout) == "torch.strided" else 0
            start = starts[bisect_right(starts, address) - 1]
            if start <= address < start + self.members[start].nbytes:
                names.setdefault(start, name)
        for start, name in names.items():
            if not self.members[start].is_intact(self.data):
                raise altered(repr(name))
