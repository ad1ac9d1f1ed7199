"""Decides which code a replay may run: what the user named, and what this user's own recorder signed.

It is asked before anything is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from nandoctor.dumps.array_roles import is_extra_state
from nandoctor.dumps.code_request import approving_command, code_rows
from nandoctor.dumps.dump import Dump
from nandoctor.errors import ModelError, UnapprovedCodeError
from nandoctor.replaying.settings import Settings
from nandoctor.text import plural

_OWN_METHODS = ("", "training_step")


def require_approval(dump: Dump, settings: Settings, *, has_model: bool) -> None:
    """Check that what the dump names is the user's own, or was named by the user.

    `has_model`: the user named the model. A loss that nobody approved does not stop a replay: it goes without.

    Raises:
        UnapprovedCodeError: the model or its method is named by the file alone, and the file is not the user's own.
        ModelError: the user named another method than the one that was recorded.
    """
    recorded = dump.recorded
    method = recorded.method if recorded is not None else ""
    if settings.method is not None and settings.method != (method or "forward"):
        raise ModelError(
            f"The dump holds calls of {method or 'forward'}, not of {settings.method}.",
            remedy="Leave --method out, or name a function that makes the call: --call FILE.py:NAME.",
        )
    if recorded is None or settings.call is not None or settings.inputs:
        method = ""  # the recorded call is not made
    allowed = _OWN_METHODS if dump.provenance.own else ("",)
    if not (method in allowed or settings.method == method):
        raise _unapproved(dump)
    if not (has_model or recorded is None or dump.provenance.own):
        raise _unapproved(dump)


def check_method(model: nn.Module, dump: Dump, settings: Settings) -> None:
    """Check that the recorded method is one that the model's class defines.

    Raises:
        ModelError: it has none of that name, or something else than a function.
    """
    method = dump.recorded.method if dump.recorded is not None else ""
    if not method or settings.call is not None or settings.inputs:
        return
    defined = next((vars(kind)[method] for kind in type(model).__mro__ if method in vars(kind)), None)
    if not inspect.isfunction(defined):
        raise ModelError(
            f"{type(model).__name__} defines no method {method!r}, which the dump holds calls of.",
            remedy="Name the class that was trained: --model FILE.py:NAME.",
        )


def state_to_load(dump: Dump) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """The dump's weights for the model, and notes; of a file that is not the user's own without extra states.

    A module may do anything with its extra state, and some of the installed ones unpickle it.
    """
    extra = [name for name in dump.state if is_extra_state(name)]
    if dump.provenance.own or not extra:
        return dump.state, []
    note = (
        f"_extra_state ({plural(len(extra), 'module')}) was not handed to the model: the dump is not your recorder's."
    )
    return {name: tensor for name, tensor in dump.state.items() if name not in extra}, [note]


def _unapproved(dump: Dump) -> UnapprovedCodeError:
    assert dump.recorded is not None
    rows = [f"  {label:<11} {text}" for label, text in code_rows(dump.recorded)]
    why = "" if dump.provenance.own else f", and it was not recorded by you: {dump.provenance.detail}"
    return UnapprovedCodeError(
        f"This dump asks to run code{why}. Nothing was run.\n\n" + "\n".join(rows),
        remedy=f"  To run it   {approving_command(dump.path, dump.recorded)}",
    )
