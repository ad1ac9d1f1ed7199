"""What the names in a dump usually mean: input, target, output, or the bookkeeping of training."""

from __future__ import annotations

import re

from nandoctor.evidence.dump_summary import Role


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAMES: dict[Role, frozenset[str]] = {
    "input": _words(
        """image images img imgs input inputs x pixels pixel_values input_ids input_values input_features inputs_embeds
        token_ids tokens token_type_ids position_ids attention_mask key_padding_mask padding_mask input_mask src
        decoder_input_ids decoder_attention_mask audio waveform spectrogram video frames text data samples features
        noisy latents timesteps points"""
    ),
    "target": _words(
        """target targets label labels y y_true mask masks gt ground_truth truth annotation annotations segmentation"""
    ),
    "output": _words(
        """output outputs out logit logits pred preds predicted prediction predictions y_hat y_pred prob probs
        probabilities score scores last_hidden_state"""
    ),
}
# Inside a compound name ("pred_boxes", "mask_logits") the rarer word decides, hence the order; one letter says nothing.
_WORD_ORDER: tuple[Role, ...] = ("output", "target", "input")

_BOOKKEEPING = _words("optim optimizer optimizers sched scheduler schedulers callbacks loops rng")


def role_of(name: str) -> Role:
    """What an array of this name usually is; of a dotted name the outermost part that says something decides."""
    for part in _parts(name):
        for role, names in _NAMES.items():
            if part in names:
                return role
    words = {word for part in _parts(name) for word in part.split("_") if len(word) > 1}
    return next((role for role in _WORD_ORDER if words & _NAMES[role]), "unknown")


def is_loss(name: str) -> bool:
    """Tell whether a number of this name is a loss: "loss", "train_loss", "losses.total", not "loss_scale"."""
    words = set(re.split(r"[\W_]+", name.lower()))
    return bool(words & {"loss", "losses"}) and not words & {"scale", "scaler", "weight", "best", "min"}


def is_extra_state(name: object) -> bool:
    """Tell whether this is what nn.Module.state_dict calls the result of get_extra_state."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def is_bookkeeping(name: str) -> bool:
    """Whether this names the state of an optimizer, scheduler, random generator or trainer: no part of a batch."""
    return any(_BOOKKEEPING.intersection(part.split("_")) for part in _parts(name))


def is_random_state(name: str) -> bool:
    """Whether this names the saved state of a random generator."""
    return any("rng" in part.split("_") for part in _parts(name))


def _parts(name: str) -> list[str]:
    """The dotted parts in snake_case, numbering removed: "inputImage.0" gives ["input_image"]."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    parts = (re.sub(r"[_\d]+$", "", part.replace("-", "_")) for part in snake.split("."))
    return [part for part in parts if part]
