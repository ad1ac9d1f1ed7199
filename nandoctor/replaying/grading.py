"""How well a replay agrees with the output that the dump saved.

In: the saved output and what the model returned. Out: a `Reproduction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nandoctor.dumps.numpy_pickle import is_dense, widened
from nandoctor.evidence.report import Grade, Reproduction
from nandoctor.tracing.tensor_tree import walk_tensors


def grade(saved: tuple[str, torch.Tensor] | None, output: Any, key: str | None = None) -> Reproduction:
    """Compare the saved array with its counterpart in `output`; `no-reference` where either is missing.

    The counterpart is the leaf at that very place, else the field of that name (`logit` also finds `logits`), else the
    only tensor of that shape.
    """
    if saved is None:
        return Reproduction(grade="no-reference")
    name, reference = saved[0], saved[1].detach()
    if not is_dense(reference):  # the dense form of a sparse one may be far larger than the file
        return Reproduction(grade="no-reference", output=name)
    found = ((path, leaf.detach()) for path, leaf in walk_tensors(output))
    leaves = {path: leaf for path, leaf in found if not leaf.is_nested and leaf.layout == torch.strided}
    path = _find_counterpart(key or name, reference, leaves)
    if path is None:
        return Reproduction(grade="no-reference", output=name)
    replayed = widened(leaves[path].to("cpu", reference.dtype).reshape(reference.shape))
    reference = widened(reference)
    saved_nonfinite, replayed_nonfinite = ~torch.isfinite(reference), ~torch.isfinite(replayed)
    both = ~(saved_nonfinite | replayed_nonfinite)
    return Reproduction(
        grade=_judge(reference, replayed, saved_nonfinite, replayed_nonfinite),
        output=name,
        num_bad_saved=int(saved_nonfinite.sum()),
        num_bad_replayed=int(replayed_nonfinite.sum()),
        numel=reference.numel(),
        max_rel_err=_max_relative_error(replayed[both], reference[both]),
    )


def _find_counterpart(name: str, reference: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> str | None:
    if name in leaves and leaves[name].shape == reference.shape:
        return name
    fitting = [path for path, leaf in leaves.items() if _squeezed(leaf) == _squeezed(reference)]
    named = [path for path in fitting if path.rpartition(".")[2].rstrip("s") == name.rpartition(".")[2].rstrip("s")]
    choices = named or fitting
    return choices[0] if len(choices) == 1 else None


def _squeezed(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape if size != 1)


def _judge(
    reference: torch.Tensor, replayed: torch.Tensor, saved_nonfinite: torch.Tensor, replayed_nonfinite: torch.Tensor
) -> Grade:
    if torch.equal(saved_nonfinite, replayed_nonfinite):
        same = torch.where(torch.isnan(reference), torch.isnan(replayed), replayed == reference)
        return "exact" if bool(same.all()) else "same-mask"
    return "elsewhere" if bool(replayed_nonfinite.any()) else "finite"


def _max_relative_error(replayed: torch.Tensor, reference: torch.Tensor) -> float | None:
    if not reference.numel():
        return None
    largest = reference.double().abs().max()
    difference = (replayed.double() - reference.double()).abs().max()
    return float(difference / largest) if largest > 0 else float(difference)
