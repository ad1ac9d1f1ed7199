"""Build the script of `nandoctor repro`: the failing op, with its tensors sliced as far as it still fails.

The script is run before it is returned.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import PurePath

import torch

from nandoctor import __version__
from nandoctor.engine.runner import FailingStep
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import NOTHING_FOUND, Origin, Report
from nandoctor.ops import GRADIENT_SUM
from nandoctor.repro_scripts.minimize import Failure, find_failure, shrink
from nandoctor.repro_scripts.op_extraction import extract_op
from nandoctor.repro_scripts.program import Program
from nandoctor.repro_scripts.script import write_script
from nandoctor.text import file_line, printable

_FINITE_IN_FP32 = ("precision", "silent", "loss-scale")
_NOT_AN_OP = ("state", "input", "optimizer")
_SEE_REPLAY = "`nandoctor replay` shows what happened, and what could be tried."


def make_script(report: Report, step: FailingStep | None) -> str:
    """Return a script that fails as the report says and needs only torch.

    Raise NanDoctorError if no operation makes the failure, or if only the project's own code can show it.
    """
    if report.verdict in NOTHING_FOUND:
        raise NanDoctorError("Nothing non-finite occurred in the replay.", remedy=_SEE_REPLAY)
    program = _find_program(report, step)
    failure = find_failure(program)
    if failure is None:
        raise NanDoctorError(
            "The op does not fail on its own with the tensors of the step.",
            remedy="The failure depends on the machine: try --device cuda, or the torch that wrote the dump.",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the attempts are not the user's code
        smallest = shrink(program, failure)
        script = write_script(smallest, failure, dict(_facts(report, failure)))
        # Run the script as it is: it must fail as stated.
        complaint = run_afresh(script)
        if complaint is not None:
            raise NanDoctorError(
                f"The script does not fail on its own ({printable(complaint)}).",
                remedy="`nandoctor replay -o report.json` saves what is known about it.",
            )
    return script


def _find_program(report: Report, step: FailingStep | None) -> Program:
    """Return the op that makes the failure, with its tensors."""
    origin = report.origin
    if step is None or origin is None or not _is_made_by_op(origin):
        reason = f"{report.headline[0].upper()}{report.headline[1:].rstrip('.')}"
        raise NanDoctorError(f"No operation of the model makes this failure. {reason}.", remedy=_SEE_REPLAY)
    return extract_op(step, origin)


def _is_made_by_op(origin: Origin) -> bool:
    """Return False for non-finite state, a sum of gradients that overflows, and a gradient that a hook made so."""
    is_handed_on = origin.phase == "backward" and not all(stats.finite for stats in origin.inputs)
    return origin.phase not in _NOT_AN_OP and origin.op != GRADIENT_SUM and not is_handed_on


def _facts(report: Report, failure: Failure) -> Iterator[tuple[str, str]]:
    yield "dump", PurePath(report.dump.path).name
    origin = report.origin
    if origin is not None:
        yield "from", f"{origin.op} in {origin.place.with_type}, {origin.phase}"
        if origin.source is not None:
            source = origin.source
            yield "line", ": ".join(filter(None, (file_line(source.file, source.line), source.text)))
    if report.cause is not None:
        yield "cause", f"{report.cause.code}: {report.cause.explanation}"
    if report.verdict in _FINITE_IN_FP32 and not failure.finite_in_fp32:
        yield "inputs", "rounded by earlier operations of the step, which is finite in fp32"
    yield "made by", f"nandoctor {__version__}, torch {torch.__version__}"


def run_afresh(script: str) -> str | None:
    """Run the script in a new process; return the last line of its error output, None if it succeeds."""
    done = subprocess.run([sys.executable, "-P", "-"], input=script.encode(), capture_output=True, check=False)
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.decode("utf-8", "replace").splitlines()[-1:]), f"exit status {done.returncode}")
