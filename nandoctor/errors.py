"""The errors a user can cause: what is wrong, what to do about it, and the exit code.

The command line prints them without a traceback; as text they name the keywords of the Python API.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence


class NanDoctorError(Exception):
    """An error that the user can fix; the base of all errors that nandoctor raises on purpose.

    Control characters in the texts, which may come from a file or a model, are written as escapes, and
    a message is cut to what a screen shows.

    Args:
        message: what is wrong.
        remedy: what to do about it.
        options: what to add to the command, after the remedy; the command line shows the whole command.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str, options: Sequence[str] = ()) -> None:
        from nandoctor.text import brief, printable, screenful  # noqa: PLC0415 - `--help` does not need it

        self.options = tuple(brief(option, 2000) for option in options)
        self.message = screenful(message)
        self.advice = "\n".join(map(printable, remedy.split("\n")))  # uncut: the rest of a quoted word would be run
        self.remedy = f"{self.advice} {shlex.join(self.options)}".rstrip()
        super().__init__(self.message)

    def __str__(self) -> str:
        from nandoctor.text import in_python  # noqa: PLC0415

        return f"{self.message}\n{in_python(self.remedy)}"


class DumpError(NanDoctorError):
    """The dump file cannot be read, or does not hold what is needed."""


class ModelError(NanDoctorError):
    """The model cannot be found, built, loaded with the weights, or called with the batch."""


class UnapprovedCodeError(ModelError):
    """A dump names code that neither the user nor the user's own recorder vouches for."""


class LossError(ModelError):
    """The loss cannot be computed in the replay: its function raised, or returned no scalar with a gradient."""


class UnsupportedTorchError(NanDoctorError):
    """The installed torch lacks a private API that nandoctor needs."""


class NonFiniteTrainingError(NanDoctorError):
    """A `Recorder` stopped the training: too many of the last steps were non-finite."""
