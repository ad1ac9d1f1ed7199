"""The small constants that a model's modules carry.

In: a model. Out: `EpsUse`s of its modules, by name and value alone: what they did only a replay can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from nandoctor.evidence.report import EpsUse
from nandoctor.evidence.rounding import LARGEST_EPS

_IS_EPS = re.compile(r"(^|[^a-z])eps(ilon)?([^a-z]|$)", re.IGNORECASE)  # not the "eps" of "steps"

# Torch's own layers, and the op whose eps theirs is.
_OPS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.LayerNorm, "layer_norm"),
    (nn.GroupNorm, "group_norm"),
    (nn.RMSNorm, "rms_norm"),
    *((kind, "batch_norm") for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)),
    *((kind, "instance_norm") for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)),
    (nn.CosineSimilarity, "cosine_similarity"),
    (nn.PairwiseDistance, "pairwise_distance"),
)


def list_constants(model: nn.Module) -> tuple[EpsUse, ...]:
    """Every small number among the modules' attributes, or those of their classes, whose name says eps."""
    return tuple(
        EpsUse(place="module", module=path, type=type(module).__name__, name=name, value=value, op=_op_of(module))
        for path, module in model.named_modules()
        for name, value in _constants_of(module)
    )


def _constants_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    attributes = {
        name: value for holder in (*reversed(type(module).__mro__), module) for name, value in vars(holder).items()
    }
    for name, value in attributes.items():
        if _IS_EPS.search(name) and isinstance(value, float) and 0 < value <= LARGEST_EPS:
            yield name, value


def _op_of(module: nn.Module) -> str | None:
    """The op of torch's own forward; a subclass that has another may do anything."""
    for kind, op in _OPS:
        if isinstance(module, kind) and type(module).__module__.startswith("torch."):
            return op
    return None
