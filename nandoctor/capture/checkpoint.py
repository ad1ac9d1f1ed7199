"""Leaves the weights of a dump to a checkpoint, where they have no room in the file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nandoctor.dumps.weight_samples import describe_samples, sample_weights
from nandoctor.dumps.writer import fit_into
from nandoctor.machine import memory_of

LOG = logging.getLogger("nandoctor")

WeightsSource = str | os.PathLike[str] | Callable[[], str | os.PathLike[str] | None]
"""The path of a checkpoint, or what tells that of the last one when a file is written."""


def leave_weights(contents: Mapping[str, Any], source: WeightsSource | None, max_nbytes: int) -> Mapping[str, Any]:
    """The contents; where the weights do not fit into `max_nbytes`, with the buffers alone and a reference.

    Buffers stay, for a forward writes to them and no checkpoint has them as they were. A few values of each weight are
    kept, so that a replay can tell whether a checkpoint is of this step; of a sharded weight none.
    """
    state = contents["state_dict"]
    if "state_dict" in fit_into(contents, max_nbytes) or not state:
        return contents
    buffers = {name: state[name] for name in contents["buffers"]}
    weights = {name: tensor for name, tensor in state.items() if name not in buffers}
    whole = {name: tensor for name, tensor in weights.items() if name not in contents["shards"]}
    size = memory_of(weights.values())
    return {
        **contents,
        "state_dict": buffers,
        "shards": {name: shard for name, shard in contents["shards"].items() if name in buffers},
        "checkpoint": {"path": _find_path(source), "samples": describe_samples(sample_weights(whole))},
        "left_out": [*contents["left_out"], f"state_dict: the weights, {size} bytes, beyond the cap of {max_nbytes}"],
    }


def _find_path(source: WeightsSource | None) -> str:
    """The checkpoint as the training names it, relative to the working directory where it is in there; "" for none."""
    try:
        path = source() if callable(source) else source
        if path is None:
            return ""
        absolute, here = Path(path).absolute(), Path.cwd()
        return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
    except Exception as error:
        LOG.warning("The recorder's weights could not tell a checkpoint (%s: %s).", type(error).__name__, error)
        return ""
