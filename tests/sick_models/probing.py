"""Runs a case without nandoctor's diagnosis: only its emulation of CUDA autocast is used.

In: a case. Out: `Outcome`, what was finite.
"""

from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nandoctor.autocast.policy import cuda_autocast
from sick_models.case import Batch, Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step of a case gave. `gradients` and `weights` map parameter names to what the step left in them.

    `optimizer` is the optimizer's state dict after the step, where the case has an optimizer.
    """

    output: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]

    @property
    def first_nonfinite(self) -> str:
        """The first of output, loss, gradients and weights that is not finite; "" where all are."""
        stages = {
            "output": self.output,
            "loss": [self.loss],
            "gradients": list(self.gradients.values()),
            "weights": list(self.weights.values()),
        }
        return next((name for name, tensors in stages.items() if not all(map(finite, tensors))), "")


def run(case: Case, *, autocast: bool) -> Outcome:
    """One training step of the case under emulated CUDA autocast or in plain fp32."""
    model, batch = case.build().train(case.train), case.batch()
    if not autocast:
        model = model.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with cuda_autocast() if autocast else nullcontext():
            output = case.call(model, batch)
            loss = (case.loss or _any_loss)(output, batch)
            # Backward belongs outside autocast; the emulation stays, for blocks that checkpointing computes again.
            with torch.autocast("cpu", enabled=False):
                (loss * case.loss_scale).backward()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    optimizer = case.optimizer(model.parameters()) if case.optimizer else None
    if optimizer is not None:
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in named.items()}
    leaves = [tensor.detach() for tensor in float_tensors(output)]
    return Outcome(
        output=leaves,
        loss=loss.detach(),
        gradients=gradients,
        weights=weights,
        optimizer=optimizer.state_dict() if optimizer else {},
    )


def distance(outcome: Outcome, reference: Outcome) -> float:
    """Norm of the difference of the outputs over the norm of the reference."""
    ours = torch.cat([tensor.double().flatten() for tensor in outcome.output])
    theirs = torch.cat([tensor.double().flatten() for tensor in reference.output])
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def float_tensors(tree: Any) -> list[Tensor]:
    """Every floating-point or complex tensor in a nest of containers and dataclasses."""
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def _any_loss(output: Any, _batch: Batch) -> Tensor:
    return torch.stack([tensor.float().mean() for tensor in float_tensors(output)]).sum()
