"""Tells from the names in a dump what they usually mean: input, target, output, or the bookkeeping of training."""

from __future__ import annotations

import re
from itertools import chain

from nandoctor.evidence.dump_summary import Role

_NAMES: dict[Role, frozenset[str]] = {
    "input": frozenset(
        """image images img imgs input inputs x pixels pixel_values input_ids input_values input_features inputs_embeds
        token_ids tokens token_type_ids position_ids attention_mask key_padding_mask padding_mask input_mask src
        decoder_input_ids decoder_attention_mask audio waveform spectrogram video frames text data samples features
        noisy latents timesteps points""".split()
    ),
    "target": frozenset(
        """target targets label labels y y_true mask masks gt ground_truth truth annotation annotations
        segmentation""".split()
    ),
    "output": frozenset(
        """output outputs out logit logits pred preds predicted prediction predictions y_hat y_pred prob probs
        probabilities score scores last_hidden_state""".split()
    ),
}
"""By role, the commonest first: in a compound name ("pred_boxes", "mask_logits") the rarer one decides."""

_BOOKKEEPING = frozenset("optim optimizer optimizers sched scheduler schedulers callbacks loops rng".split())


def role_of(name: str) -> Role:
    """Return the usual role of an array with this name; the outermost known part of a dotted name decides."""
    parts = _parts(name)
    by_part = (role for part in parts for role, names in _NAMES.items() if part in names)
    words = {word for part in parts for word in part.split("_") if len(word) > 1}  # single letters are ignored
    by_word = (role for role in reversed(_NAMES) if words & _NAMES[role])
    return next(chain(by_part, by_word), "unknown")


def is_loss(name: str) -> bool:
    """Return True for the name of a loss: "loss", "train_loss", "losses.total", but not "loss_scale"."""
    words = set(re.split(r"[\W_]+", name.lower()))
    return bool(words & {"loss", "losses"}) and not words & {"scale", "scaler", "weight", "best", "min"}


def is_extra_state(name: object) -> bool:
    """Return True for the key under which nn.Module.state_dict stores the result of get_extra_state."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def is_bookkeeping(name: str) -> bool:
    """Return True for the state of an optimizer, scheduler, random generator or trainer: not part of a batch."""
    return any(_BOOKKEEPING.intersection(part.split("_")) for part in _parts(name))


def is_random_state(name: str) -> bool:
    """Return True for the saved state of a random generator."""
    return any("rng" in part.split("_") for part in _parts(name))


def _parts(name: str) -> list[str]:
    """Return the dotted parts in snake_case, without numbering: "inputImage.0" gives ["input_image"]."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    parts = (re.sub(r"[_\d]+$", "", part.replace("-", "_")) for part in snake.split("."))
    return [part for part in parts if part]
