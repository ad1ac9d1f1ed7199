"""What is called in place of the classes and functions that a pickle names: nothing of a library is imported.

Containers of libraries become plain mappings, parameters and tensors of a class of their own plain tensors.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from nandoctor.dumps.numpy_pickle import PickledArray, PickledDtype
from nandoctor.dumps.stored_tensor import is_tensor
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


def _make_ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """An ordered dict; Python 2 writes the pairs into the call, and the scan does not see which of them are keys.

    Raises:
        pickle.UnpicklingError: a key could collide with others.
    """
    if type(pairs) not in (list, tuple) or not all(type(pair) is list and type(pair[0]) is str for pair in pairs):
        raise pickle.UnpicklingError("no pairs of a name and a value")
    return OrderedDict(pairs)


def _make_array(*_: object) -> PickledArray:
    """Stands for numpy's `_reconstruct`, called with (ndarray, (0,), b"b") before the state comes."""
    return PickledArray()


def _empty_bytes() -> bytes:
    """Stands for `bytes`, which pickle calls for the content of an empty array; with a number it would fill memory."""
    return b""


def _encode(text: str, codec: str) -> bytes:
    """Stands for `_codecs.encode`, which pickle calls for bytes; the scan has counted a byte for each letter.

    Raises:
        pickle.UnpicklingError: it is another codec than latin1, and the bytes could be more.
    """
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes in another codec than latin1")
    return str.encode(text, "latin1")


class _Kind:
    """Stands for a class that only names another's: everything is a plain tensor here."""


def _make_plain(tensor: object, *_: object) -> object:
    """A parameter, with whatever attributes it had, as the tensor that it holds.

    Raises:
        pickle.UnpicklingError: it holds another thing, a function say, which would come out unknown to the scan.
    """
    if not is_tensor(tensor):
        raise pickle.UnpicklingError("a parameter without a tensor")
    return tensor


def _rebuild_by(rebuild: Callable[..., object], _: object, arguments: tuple[object, ...], __: object) -> object:
    """A tensor with attributes, or of a class of its own, as a plain one; the scan has seen what `rebuild` is."""
    if type(arguments) is not tuple:
        raise pickle.UnpicklingError("no tuple of arguments")
    return rebuild(*arguments)


ENCODE, REBUILD_ANY = "_codecs.encode", "torch._tensor._rebuild_from_type_v2"
_STAND_INS: Mapping[str, Callable[..., object]] = {
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytes": _empty_bytes,
    ENCODE: _encode,
    "collections.OrderedDict": _make_ordered,
    "collections.Counter": Counter,
    # numpy 2 renamed `numpy.core` to `numpy._core`; each writes its own name into pickles.
    **{f"numpy.{core}.multiarray._reconstruct": _make_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": PickledArray for core in ("core", "_core")},
    "numpy.dtype": PickledDtype,
    "numpy.ndarray": PickledArray,
    "torch.Tensor": _Kind,
    "torch.nn.parameter.Parameter": _Kind,
    "torch._utils._rebuild_parameter": _make_plain,
    "torch._utils._rebuild_parameter_with_state": _make_plain,
    REBUILD_ANY: _rebuild_by,
    "UserDict.IterableUserDict": _of_kind(_UserDict, "collections.UserDict"),  # as protocol 2 writes it
    "collections.UserDict": _of_kind(_UserDict, "collections.UserDict"),
    "transformers.tokenization_utils_base.BatchEncoding": _of_kind(_UserDict, "transformers.BatchEncoding"),
    "transformers.feature_extraction_utils.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "transformers.image_processing_base.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "tokenizers.Encoding": ContainerFields,
    "types.SimpleNamespace": _of_kind(ContainerFields, "types.SimpleNamespace"),
    "torch.nn.utils.rnn.PackedSequence": _PackedSequence,
}


def find_stand_in(name: str) -> Callable[..., object] | None:
    """What is called for the class or function of this name; every class of a model's output is known."""
    return _make_output if _MODEL_OUTPUT.fullmatch(name) else _STAND_INS.get(name)
