"""Build the script of `nandoctor repro`: the failing op, with its tensors sliced as far as it still fails.

The script needs only torch, shows what fp32 gives too, and is run before it is returned.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from nandoctor import __version__
from nandoctor.engine.runner import FailingStep
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import NOTHING_FOUND, Origin, Report
from nandoctor.ops import GRADIENT_SUM
from nandoctor.repro_scripts.op_extraction import extract_op
from nandoctor.repro_scripts.program import (
    INDENT,
    METHOD,
    TESTS,
    Failure,
    Program,
    find_failure,
    is_cast,
    shrink,
    write_number,
)
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


_NAMES = {"nan": "NaN", "+inf": "an infinity", "-inf": "a negative infinity"}
_TENSOR_WIDTH = 100
_MAX_NUMEL = 20_000


def write_script(program: Program, failure: Failure, facts: Mapping[str, str]) -> str:
    """Return the script; `facts` are the labelled lines of its docstring."""
    tensors = "\n".join(f"{name} = {write_tensor(leaf)}" for name, leaf in program.leaves.items())
    needed = [name for name in ("inf", "nan") if re.search(rf"\b{name}\b", f"{tensors} {program.text}")]
    second = f"from torch import {', '.join(needed)}\n" if needed else ""
    imports = f'import torch\n{second}\nif torch.cuda.is_available():\n{INDENT}torch.set_default_device("cuda")'
    body = f"{tensors}\n\n" + "\n".join(_checks(program, failure))
    return "\n\n\n".join([f"{_docstring(program, failure, facts)}\n\n{imports}", program.text, body]) + "\n"


def _docstring(program: Program, failure: Failure, facts: Mapping[str, str]) -> str:
    width = max(map(len, facts), default=0)
    lines = "\n".join(f"{label:<{width}}  {_printable(text)}" for label, text in facts.items())
    where = "in the gradients of " if program.gradient else "from "
    name = program.function.replace(METHOD, "torch.Tensor.")
    what = f"{_NAMES[failure.kind].capitalize().replace('Nan', 'NaN')} {where}{name}"
    last = "Needs torch alone, on a CPU or with CUDA; exits with 0 if it fails as stated."
    return f'"""{what}: the smallest case.\n\n{lines}\n\n{last}\n"""'


def _printable(text: str) -> str:
    """Return text that is safe inside the docstring: a project's names and lines may contain anything."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain.replace("\\", "/").replace('"""', "'''").removesuffix('"')


def _checks(program: Program, failure: Failure) -> Iterator[str]:
    yield f"got = case({', '.join(program.leaves)})"
    yield "where = ~torch.isfinite(got)"
    yield 'print("got:", got[where])'
    yield f"assert torch.{TESTS[failure.kind].__name__}(got).any()"
    yield ""
    yield f"# fp32 {'is finite' if failure.finite_in_fp32 else 'fails too'}, from the same inputs."
    leaves = program.leaves.items()
    wide = [f"{name}.float()" if is_cast(leaf) and leaf.dtype != torch.float32 else name for name, leaf in leaves]
    yield f"in_fp32_throughout = case({', '.join([*wide, *(['low=torch.float32'] if program.takes_low else [])])})"
    yield 'print("in fp32:", in_fp32_throughout[where])'
    yield f"assert {'' if failure.finite_in_fp32 else 'not '}torch.isfinite(in_fp32_throughout).all()"


def write_tensor(tensor: torch.Tensor) -> str:
    """Return an expression for a dense tensor, on several lines if one would be too long.

    Raise NanDoctorError for a tensor with too many values to read.
    """
    shape, dtype = list(tensor.shape), str(tensor.dtype)
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    values = tensor.flatten().tolist()
    if len(values) > 1 and len({*map(repr, values)}) == 1:  # as text, -0.0 differs from 0.0, and all NaNs are equal
        return f"torch.full({shape}, {write_number(values[0], tensor.dtype)}, dtype={dtype})"
    if len(values) > _MAX_NUMEL:
        raise NanDoctorError(
            f"It takes {len(values)} values to fail, too many for a script.",
            remedy="`nandoctor replay -o report.json` saves what is known about them.",
        )
    nested = _write_nested(tensor.tolist(), tensor.dtype)
    line = f"torch.tensor({nested}, dtype={dtype})"
    if len(line) <= _TENSOR_WIDTH:
        return line
    rows = textwrap.indent(textwrap.fill(nested, _TENSOR_WIDTH - 8, break_long_words=False), INDENT)
    return f"torch.tensor(\n{rows},\n    dtype={dtype},\n)"


def _write_nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_write_nested(value, dtype) for value in values)}]"
    return write_number(values, dtype)
