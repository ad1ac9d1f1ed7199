"""Who trains which parameters of the model: optimizers as they are seen, and the training loop itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from nandoctor.capture.deepspeed import DeepSpeedEngine
from nandoctor.capture.observer import Observer
from nandoctor.capture.updates import TrainedParameters, TrainingLoop

_MAX_QUIET = 256
"""Steps without a write of the loop's own, after which its weights are no longer copied: a checkpoint was loaded."""


class Trainers:
    """What is known of the model's parameters, found out once and again when some take others' places.

    `probe` is the first that gradients are wanted of, and `held` are the weights when all was found. `copies` tells to
    copy the weights before each forward: those of a loop that was seen to write them without an optimizer (SAM, a
    descent by hand), and of any until an optimizer is seen to be the first to write.
    """

    def __init__(self, observer: Observer, undo_nbytes: int) -> None:
        self._observer, self._undo_nbytes = observer, undo_nbytes
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._trained: dict[int, TrainedParameters] = {}
        self._all: TrainedParameters | None = None
        self.probe: nn.Parameter | None = None
        self.has_optimizer = False
        self.copies, self._writes_seen, self._num_quiet = True, False, 0
        self.forget()

    def forget(self) -> None:
        """Look at everything anew: a head is put on, a checkpoint takes the places of the parameters."""
        self._trained.clear()
        self._name_parameters()
        self._all, self.held = None, self._observer.held

    def forget_all(self) -> None:
        """Look anew at what the training loop itself may write."""
        self._all = None

    def note_write(self) -> None:
        """The loop has written weights by itself."""
        self._num_quiet = 0
        if not (self.copies and self._writes_seen):
            self.copies = self._writes_seen = True
            self._all = None

    def note_quiet(self, *, updated: bool) -> None:
        """The loop has left the weights to its optimizers, which may have `updated` them."""
        self._num_quiet += 1
        if self.copies and updated and (not self._writes_seen or self._num_quiet > _MAX_QUIET):
            self.copies, self._all = False, None

    def _name_parameters(self) -> None:
        found = dict(self._observer.model.named_parameters())
        if all(isinstance(parameter, nn.Parameter) for parameter in found.values()):  # else lent by functional_call
            self._parameters = found
            self._names = {id(parameter): name for name, parameter in found.items()}
            self.probe = next((parameter for parameter in found.values() if parameter.requires_grad), None)
            self._observer.find_trained()

    @property
    def optimizers(self) -> list[Optimizer | DeepSpeedEngine]:
        """Those that train a parameter of the model, in the order of their first steps."""
        return [t.optimizer for t in self._trained.values() if t.names and t.optimizer is not None]

    def find(self, optimizer: Optimizer | DeepSpeedEngine) -> TrainedParameters:
        """What the optimizer trains of this model; found once, and again when it was given more."""
        trained = self._trained.get(id(optimizer))
        if trained is None or trained.optimizer is not optimizer or not trained.is_current:
            self._name_parameters()
            trained = TrainedParameters(optimizer, self._names, self._undo_nbytes)
            others = {key: other for key, other in self._trained.items() if other.optimizer is not None}
            self._trained = {**others, id(optimizer): trained}
            self.has_optimizer = self.has_optimizer or bool(trained.names)
        return trained

    def find_all(self) -> TrainedParameters:
        """All parameters, whoever trains them: a micro-batch may end before any optimizer was seen."""
        if self._all is None or not self._all.is_current:
            self._name_parameters()
            self._all = self._find_all(self._undo_nbytes if self.copies else 0)
        return self._all

    def copy_all(self) -> Mapping[str, torch.Tensor] | None:
        """A copy of the weights, of which nothing is held: for a step that has failed; None without room."""
        return self._find_all(self._undo_nbytes).keep()

    def _find_all(self, undo_nbytes: int) -> TrainedParameters:
        loop = TrainingLoop(parameter for parameter in self._parameters.values() if parameter.requires_grad)
        return TrainedParameters(loop, self._names, undo_nbytes)
