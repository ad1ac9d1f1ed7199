"""The message of a verb that fails, and its exit code."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from nandoctor.errors import NanDoctorError

EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # 128 + SIGPIPE: the status in a shell of a program whose pipe was closed, as by `| head`
EXIT_CANNOT_TELL = 125  # what `git bisect run` takes for "skip this commit"
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO)  # a full device


def tell(message: str) -> None:
    """Print a message on standard error, if that is writable, with unprintable characters as escapes."""
    from nandoctor.text import printable

    try:
        click.echo("\n".join(map(printable, message.split("\n"))), err=True)
    except OSError:
        sys.stderr = io.StringIO()


def discard_output() -> None:
    """Drop what could not be written to standard output: Python would try once more at exit, and complain."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    sys.stdout = io.StringIO()


TYPED = "nandoctor.typed"
"""The key under which a context has the words of the command line."""


def remedy_for(error: NanDoctorError) -> str:
    """Return what to do; if options are missing, the user's own command with them in place of those it has."""
    context = click.get_current_context(silent=True)
    if not error.options or context is None:
        return error.remedy
    replaced = {*error.options[::2], *(["--model-arg"] if "--model" in error.options else ())}  # of the other model
    typed, words = iter(context.meta[TYPED]), ["nandoctor"]
    for word in typed:
        if word in replaced:
            next(typed, None)  # its value
        elif word.partition("=")[0] not in replaced:
            words.append(word)
    return f"{error.advice}\n  {shlex.join([*words, *error.options])}"


@contextmanager
def failures_told() -> Iterator[None]:
    """Print one clear message for an error that the user can fix, and exit."""
    try:
        yield
    except NanDoctorError as error:
        tell(f"nandoctor: {error.message}\n{remedy_for(error)}")
        try:
            sys.stdout.flush()
        except OSError:  # its reader has gone
            discard_output()
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
def exit_code_answers() -> Iterator[None]:
    """Exit with 125 on any failure, including one of writing, in a verb whose exit codes are answers."""
    try:
        yield
    except Exception as error:
        discard_output()
        if not isinstance(error, BrokenPipeError):  # the reader of the output has gone
            tell(f"nandoctor: cannot tell: {getattr(error, 'message', repr(error))}")
        sys.exit(EXIT_CANNOT_TELL)
