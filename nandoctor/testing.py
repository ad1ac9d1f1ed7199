"""An assertion for the tests of a project: the step that once failed has to pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nandoctor.dumps.dump import Dump
    from nandoctor.replaying.model_loading import ModelSource

__all__ = ["assert_step_passes"]


def assert_step_passes(dump: Dump | str | os.PathLike[str], model: ModelSource | None = None, **settings: Any) -> None:
    """Replay the step of a dump with `model`, and check that output, loss and gradients are finite and near to fp32.

    For a plain dump, which holds no hashes of the code, it is assumed that the code has changed since.

    Args:
        dump: a path, or what `nandoctor.load` returns.
        model: a Module, a class or function that builds one, or a SPEC.
        **settings: the keywords of `nandoctor.replay` but `per_sample`, `fixes`, `max_trials` and `time`.

    Raises:
        AssertionError: the step fails, or it passes for another reason than a change of the code: nothing has changed,
            or the mode or the random state of the failing step is not known.
        NanDoctorError: the dump, the model or a setting is wrong.
    """
    __tracebackhide__ = True
    from nandoctor.case import verify  # noqa: PLC0415  (torch is imported when a test asks)
    from nandoctor.views.document import document  # noqa: PLC0415
    from nandoctor.views.terminal import plain_text  # noqa: PLC0415

    verification = verify(dump, model, changed=True, **settings)
    code = verification.code
    if verification.exit_code == 0 and not code.changes and code.basis == "hash":
        files = ", ".join(code.compared)
        raise AssertionError(f"CANNOT TELL: the step passes, and nothing has changed since it failed ({files})")
    if verification.exit_code != 0:
        raise AssertionError(plain_text(document(verification)).rstrip())
