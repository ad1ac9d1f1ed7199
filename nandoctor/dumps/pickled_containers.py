"""Containers of libraries in a pickle, rebuilt as plain mappings without importing the libraries."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from nandoctor.dumps.trees import KIND, PACKED_SEQUENCE

# The dataclasses that models of these libraries return: each is an OrderedDict of its fields.
_MODEL_OUTPUT = re.compile(r"(transformers|diffusers)\.[\w.]+\.[A-Z]\w*Output\w*")


class _Fields(dict[str, Any]):
    """Stands for an object whose state is the mapping of its attributes."""

    kind = ""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        fields = self._fields_in(state) if isinstance(state, Mapping) else {}
        self.update({name: fields[name] for name in fields if isinstance(name, str)})
        self[KIND] = self.kind

    def _fields_in(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return state


class _UserDict(_Fields):
    """Stands for `collections.UserDict` and what derives from it, which keep their items under "data"."""

    def _fields_in(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        data = state.get("data")
        return data if isinstance(data, Mapping) else {}


class _PackedSequence(_Fields):
    """Stands for torch's named tuple of that name, called with its fields."""

    def __new__(cls, *values: Any) -> _PackedSequence:
        made = super().__new__(cls)
        made.update(zip(("data", "batch_sizes", "sorted_indices", "unsorted_indices"), values, strict=False))
        made[KIND] = PACKED_SEQUENCE
        return made


def _of_kind(base: type[_Fields], kind: str) -> type[_Fields]:
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
    "tokenizers.Encoding": _Fields,
    "types.SimpleNamespace": _of_kind(_Fields, "types.SimpleNamespace"),
    "torch.nn.utils.rnn.PackedSequence": _PackedSequence,
    "a model's output": _make_output,  # a name that no pickle can ask for; the callable has to be among the values
}


def is_container(name: str) -> bool:
    """Whether a class of this name is rebuilt here."""
    return name in CONTAINERS or _MODEL_OUTPUT.fullmatch(name) is not None


class StandIns(dict[str, Callable[..., object]]):
    """The names that a pickle may ask for with what stands for each; every class of a model's output is one."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_container(name))

    def __missing__(self, name: str) -> Callable[..., object]:
        if not is_container(name):
            raise KeyError(name)
        return _make_output
