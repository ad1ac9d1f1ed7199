"""Reads a model's weights from a directory of torch.distributed.checkpoint (DCP), with torch's own reader.

Its metadata is a pickle, so torch runs any code that it names: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nandoctor.dumps.classify import choose_state
from nandoctor.dumps.file_type import damaged
from nandoctor.errors import DumpError
from nandoctor.file_memory import map_empty
from nandoctor.text import brief


def read_distributed(folder: Path, *, trust: bool) -> Mapping[str, torch.Tensor]:
    """Return the state dict of the model in the directory.

    Raises:
        DumpError: it was not trusted, is damaged, or holds no tensors.
    """
    if not trust:
        raise DumpError(
            "it is a directory of torch.distributed.checkpoint (DCP): reading it runs any code that it names.",
            remedy="If you know who wrote it, add --trust; or make one file of it: python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY weights.pt.",
        )
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
        found = metadata.state_dict_metadata.items()
        described = {name: item for name, item in found if isinstance(item, TensorStorageMetadata)}
        names = _choose_names(list(described), metadata.planner_data or {})
        state = {name: map_empty(described[name].size, described[name].properties.dtype) for name in names}
        with warnings.catch_warnings(action="ignore"):  # that one process loads without the others
            load(state, storage_reader=reader, no_dist=True)
    except DumpError:
        raise
    except (Exception, CheckpointException) as error:  # torch raises anything for a damaged directory
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise damaged(f"torch cannot read it: {brief(reason)}") from error
    return {names[name]: tensor for name, tensor in state.items()}


def _choose_names(tensors: Sequence[str], paths: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the model's tensors, each with its name in the state dict; an optimizer's are left out."""
    groups: dict[str, dict[str, str]] = {}
    for name in tensors:
        places = [str(part) for part in paths.get(name) or (name,)]
        if not any(place.startswith("optim") for place in places[:-1]):
            groups.setdefault(".".join(places[:-1]), {})[name] = places[-1]
    if not groups:
        raise DumpError("it holds no tensors of a model.", remedy="Give the directory of the model's own checkpoint.")
    tables: Any = groups  # chosen by names and lengths alone
    return groups[choose_state(tables)]
