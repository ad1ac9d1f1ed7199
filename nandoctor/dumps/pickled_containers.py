"""Containers of libraries in a pickle, rebuilt as plain mappings without importing the libraries."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from nandoctor.dumps.trees import KIND, PACKED_SEQUENCE

# The dataclasses that models of these libraries return: each is an OrderedDict of its fields.
_MODEL_OUTPUT = re.compile(r"(transformers|diffusers)\.[\w.]+\.[A-Z]\w*Output\w*")


class ContainerFields(dict[str, Any]):
    """Stands for an object whose state is the mapping of its attributes."""

    kind = ""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def take(self, fields: Mapping[Any, Any]) -> None:
        """Keep the fields, those that have a name."""
        self.update({name: fields[name] for name in fields if isinstance(name, str)})
        self[KIND] = self.kind

    def fields_in(self, state: object) -> Mapping[Any, Any]:
        """The fields that the object's state tells, if any."""
        return state if isinstance(state, Mapping) else {}


class _UserDict(ContainerFields):
    """Stands for `collections.UserDict` and what derives from it, which keep their items under "data"."""

    def fields_in(self, state: object) -> Mapping[Any, Any]:
        """The items."""
        return super().fields_in(super().fields_in(state).get("data"))


class _PackedSequence(ContainerFields):
    """Stands for torch's named tuple of that name, called with its fields."""

    def __new__(cls, *values: Any) -> _PackedSequence:
        made = super().__new__(cls)
        made.update(zip(("data", "batch_sizes", "sorted_indices", "unsorted_indices"), values, strict=False))
        made[KIND] = PACKED_SEQUENCE
        return made


def _of_kind(base: type[ContainerFields], kind: str) -> type[ContainerFields]:
    return type(base.__name__, (base,), {"kind": kind})


def _make_output(*_: object) -> OrderedDict[str, Any]:
    """Stands for the class of a model's output, called with its fields, which come once more as items."""
    return OrderedDict()


CONTAINERS: dict[str, Callable[..., object]] = {
    "UserDict.IterableUserDict": _of_kind(_UserDict, "collections.UserDict"),  # as protocol 2 writes it
    "collections.UserDict": _of_kind(_UserDict, "collections.UserDict"),
    "transformers.tokenization_utils_base.BatchEncoding": _of_kind(_UserDict, "transformers.BatchEncoding"),
    "transformers.feature_extraction_utils.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "transformers.image_processing_base.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "tokenizers.Encoding": ContainerFields,
    "types.SimpleNamespace": _of_kind(ContainerFields, "types.SimpleNamespace"),
    "torch.nn.utils.rnn.PackedSequence": _PackedSequence,
}


def find_container(name: str) -> Callable[..., object] | None:
    """What rebuilds the class of this name; every class of a model's output is known."""
    return _make_output if _MODEL_OUTPUT.fullmatch(name) else CONTAINERS.get(name)
