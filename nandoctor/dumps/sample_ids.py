"""Identifies the samples of a batch among all samples of the data.

They go by names in the batch (paths, indexes into the dataset), else by digests of their inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.tensors import stored_values
from nandoctor.dumps.trees import Slot
from nandoctor.evidence.triage import SampleId
from nandoctor.text import brief

_NAMES = frozenset(
    "path paths file files filename filenames file_name fname image_path name names key keys __key__ "
    "id ids uid uids image_id image_ids sample_id sample_ids index indices indexes idx sample_index sample_idx".split()
)
_NUM_DIGITS = 12


def identify_samples(dump: Dump, samples: Sequence[int], inputs: Collection[str]) -> tuple[SampleId, ...]:
    """Return an identifier of each of `samples`, in their order; empty if the batch has none of them.

    `inputs` are the names of the arrays that the model may have been called with.
    """
    arrays = [stored_values(dump.arrays[name]) for name in inputs if name in dump.arrays]
    arrays = [array for array in arrays if array.dim() and not array.is_quantized]
    size = max((len(array) for array in arrays), default=0)
    if not samples or max(samples) >= size:
        return ()
    named = next(_names(dump, size), None)
    if named is not None:
        return tuple(SampleId(by="name", text=brief(named[sample])) for sample in samples)
    parts = [array for array in arrays if len(array) == size]
    return tuple(SampleId(by="content", text=_digest(parts, sample)) for sample in samples)


def _names(dump: Dump, size: int) -> Iterator[list[str]]:
    """Yield lists that name every sample of the batch: distinct strings, or distinct integers under a usual name."""
    arrays = {name: Slot(name=name) for name in dump.arrays}
    trees = (dump.scalars, arrays, dump.recorded.batch)
    for name, values in (found for tree in trees for found in _lists_in(tree, "", dump)):
        if len(values) == size == len(set(values)):
            texts = all(isinstance(value, str) for value in values)
            numbers = all(type(value) is int for value in values) and name.rpartition(".")[2].lower() in _NAMES
            if texts or numbers:
                yield [str(value) for value in values]


def _lists_in(tree: Any, name: str, dump: Dump) -> Iterator[tuple[str, list[Any]]]:
    """Yield every flat list of strings or integers, and every vector of integers, by dotted name."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _lists_in(item, f"{name}.{key}", dump)
    elif isinstance(tree, Slot) and tree.name in dump.arrays:
        array = dump.arrays[tree.name]
        is_whole = str(array.dtype).startswith(("torch.int", "torch.uint"))
        if is_whole and array.dim() == 1 and array.layout is torch.strided:
            yield name, array.tolist()
    elif isinstance(tree, (list, tuple)):
        if all(isinstance(item, (str, int)) for item in tree):
            yield name, list(tree)
        for index, item in enumerate(tree):
            yield from _lists_in(item, f"{name}.{index}", dump)


def _digest(arrays: Sequence[torch.Tensor], sample: int) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        row = array[sample].detach().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{row.dtype}{tuple(row.shape)}".encode())
        digest.update(row.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_NUM_DIGITS]
