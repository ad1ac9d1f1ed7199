"""Track which parameters of the model each optimizer trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.capture.deepspeed import DeepSpeedEngine
from nandoctor.capture.observer import Observer
from nandoctor.capture.updates import TrainedParameters, TrainingLoop


class Trainers:
    """A cache of the model's parameters and their optimizers, which is rebuilt when parameters are replaced.

    `probe` is the first parameter that requires gradients; `held` are the weights at the last rebuild. `has_optimizer`
    is True once an optimizer was seen that trains some.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._trained: dict[int, TrainedParameters] = {}
        self._all: TrainedParameters | None = None
        self.probe: nn.Parameter | None = None
        self.has_optimizer = False
        self.forget()

    def forget(self) -> None:
        """Rebuild everything: a head was added, or the parameters of a checkpoint replaced the model's."""
        self._trained.clear()
        self._name_parameters()
        self._all, self.held = None, self._observer.held

    def _name_parameters(self) -> None:
        found = dict(self._observer.model.named_parameters())
        if all(isinstance(parameter, nn.Parameter) for parameter in found.values()):  # else lent by functional_call
            self._parameters = found
            self._names = {id(parameter): name for name, parameter in found.items()}
            self.probe = next((parameter for parameter in found.values() if parameter.requires_grad), None)
            self._observer.find_trained()

    @property
    def optimizers(self) -> list[Optimizer | DeepSpeedEngine]:
        """The optimizers that train a parameter of the model, in the order of their first steps."""
        return [t.optimizer for t in self._trained.values() if t.names and t.optimizer is not None]

    def find(self, optimizer: Optimizer | DeepSpeedEngine) -> TrainedParameters:
        """Return the parameters of this model that the optimizer trains; cached until its parameters change."""
        trained = self._trained.get(id(optimizer))
        if trained is None or trained.optimizer is not optimizer or not trained.is_current:
            self._name_parameters()
            trained = TrainedParameters(optimizer, self._names, self._observer.undo_nbytes)
            others = {key: other for key, other in self._trained.items() if other.optimizer is not None}
            self._trained = {**others, id(optimizer): trained}
            self.has_optimizer = self.has_optimizer or bool(trained.names)
        return trained

    def find_all(self) -> TrainedParameters:
        """Return all parameters that require gradients: a micro-batch may end before any optimizer was seen."""
        if self._all is None or not self._all.is_current:
            self._name_parameters()
            self._all = self._find_all(undo_nbytes=0)
        return self._all

    def copy_all(self) -> Mapping[str, torch.Tensor] | None:
        """Return a fresh copy of the weights, for a step that has failed; None if there is no room for it."""
        return self._find_all(self._observer.undo_nbytes).keep()

    def _find_all(self, undo_nbytes: int) -> TrainedParameters:
        loop = TrainingLoop(parameter for parameter in self._parameters.values() if parameter.requires_grad)
        return TrainedParameters(loop, self._names, undo_nbytes)
