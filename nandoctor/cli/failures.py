"""What is said where a verb fails, and the exit code that goes with it."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from nandoctor.errors import NanDoctorError

if TYPE_CHECKING:
    from pathlib import Path

EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # 128 + SIGPIPE: what a shell says of any program whose pipe was closed, as by `| head`
EXIT_CANNOT_TELL = 125  # what `git bisect run` takes for "skip this commit"
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO)  # a full device


def tell(message: str) -> None:
    """Say something on standard error, if that takes it; whatever file names are in it, no terminal obeys them."""
    from nandoctor.text import printable

    try:
        click.echo("\n".join(map(printable, message.split("\n"))), err=True)
    except OSError:
        sys.stderr = io.StringIO()


def discard_output() -> None:
    """Drop what standard output did not take: Python would try once more when it ends, and complain."""
    sys.stdout = io.StringIO()


@contextmanager
def failures_told() -> Iterator[None]:
    """A context that ends in one clear message where the user can put things right."""
    try:
        yield
    except NanDoctorError as error:
        tell(f"nandoctor: {error.message}\n{error.remedy}")
        sys.exit(error.exit_code)
    except (click.ClickException, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        tell("nandoctor: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        discard_output()
        sys.exit(EXIT_READER_GONE)
    except Exception as error:
        from nandoctor.machine import is_out_of_memory

        if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
            discard_output()
            tell(f"nandoctor: the output could not be written ({error.strerror}).")
        elif isinstance(error, OSError) and isinstance(error.filename, str):
            from nandoctor.text import brief

            tell(f"nandoctor: {brief(error.filename, 200)}: {error.strerror}.\nCheck the path.")
        elif is_out_of_memory(error):
            tell("nandoctor: there is not enough memory for this.\nRun it where there is more memory.")
        else:
            raise
        sys.exit(1)


@contextmanager
def exit_code_answers(*files: Path) -> Iterator[None]:
    """A context of a verb whose exit codes are answers: whatever goes wrong, the writing included, exits with 125.

    `files` are told to be missing then.
    """
    try:
        yield
    except Exception as error:
        discard_output()
        from nandoctor.text import printable

        if not isinstance(error, BrokenPipeError):  # whoever reads has gone, and wants to hear nothing
            tell(f"nandoctor: cannot tell: {printable(getattr(error, 'message', repr(error)))}")
        for file in files:
            tell(f"Not written: {file}")
        sys.exit(EXIT_CANNOT_TELL)
