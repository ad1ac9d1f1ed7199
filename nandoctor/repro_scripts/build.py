"""Build the script of `nandoctor repro`: the failing op, with its tensors sliced as far as it still fails.

The script is run before it is returned.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import torch

from nandoctor import __version__
from nandoctor.dumps.optimizer_state import SecondMoment
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Origin, Report
from nandoctor.evidence.trace import OpCall
from nandoctor.evidence.verdicts import NOTHING_FOUND
from nandoctor.ops import GRADIENT_SUM
from nandoctor.replaying.runner import FailingStep, Watch
from nandoctor.repro_scripts.minimize import Failure, find_failure, shrink
from nandoctor.repro_scripts.op_extraction import NOT_THE_SAME, ExtractedOps, extract_ops
from nandoctor.repro_scripts.program import Node, Program, Ref
from nandoctor.repro_scripts.script import write_script
from nandoctor.text import file_line, printable

_FINITE_IN_FP32 = ("precision", "silent", "loss-scale")
_OUTSIDE = ("weight", "buffer", "batch")
_SEE_REPLAY = "`nandoctor replay` shows what happened, and what could be tried."


def make_script(report: Report, step: FailingStep | None, saved: Mapping[str, torch.Tensor]) -> str:
    """Return a script that fails as the report says and needs only torch; `saved` are the weights of the dump.

    Raise NanDoctorError if there is nothing to show, or if only the project's own code can show it.
    """
    if report.verdict in NOTHING_FOUND:
        raise NanDoctorError("Nothing non-finite occurred in the replay.", remedy=_SEE_REPLAY)
    program, failure = _find_program(report, step, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the attempts are not the user's code
        smallest = shrink(program, failure)
        script = write_script(smallest, failure, dict(_facts(report)))
        # Run the script as it is: it must fail as stated.
        complaint = run_afresh(script)
        if complaint is not None:
            raise NanDoctorError(
                f"The script does not fail on its own ({printable(complaint)}).",
                remedy="`nandoctor replay -o report.json` saves what is known about it.",
            )
    return script


def _find_program(
    report: Report, step: FailingStep | None, saved: Mapping[str, torch.Tensor]
) -> tuple[Program, Failure]:
    origin = report.origin
    if step is None:
        return _with_failure(_nonfinite_weight(report, saved))
    if origin is None:
        raise NanDoctorError("The report names no origin.", remedy=_SEE_REPLAY)
    if origin.phase == "optimizer":
        return _with_failure(_optimizer_step(origin, step.second_moments))
    backward = origin.phase == "backward"
    ops = step.run(watch=Watch(stage="repro", ops=True, backward=backward)).trace.ops
    target = _find_reader(origin, ops) if origin.phase in ("state", "input") else _find_origin(origin, ops)
    extracted = extract_ops(step, ops, target, backward=backward)
    return _grow(extracted, wants_finite=report.verdict in _FINITE_IN_FP32)


def _with_failure(program: Program) -> tuple[Program, Failure]:
    """Return the program and how it fails; raise NanDoctorError if it does not fail on its own."""
    failure = find_failure(program)
    if failure is None:
        raise NanDoctorError(
            "The op does not fail on its own with the tensors of the step.",
            remedy="The failure depends on the machine: try --device cuda, or the torch that wrote the dump.",
        )
    return program, failure


def _find_origin(origin: Origin, ops: Sequence[OpCall]) -> OpCall:
    _require_made_by_op(origin)
    key = (*origin.place.key, origin.op, origin.nth)
    for op in ops if origin.function is None else ():
        if op.key == key:
            return op
    if origin.phase != "backward":
        raise NanDoctorError(f"{origin.op} was not seen again in a second run.", remedy=NOT_THE_SAME)
    raise NanDoctorError(
        f"{origin.function or origin.op} is a custom autograd Function: only the project's own code can show it.",
        remedy="Call the Function alone, with torch.autograd.gradcheck or a gradient of the size in the report.",
    )


def _require_made_by_op(origin: Origin) -> None:
    """Raise NanDoctorError if no operation made the non-finite gradient."""
    if origin.op == GRADIENT_SUM:
        raise NanDoctorError(
            f"No operation fails: the sum of {len(origin.inputs)} gradients overflows; each of them is finite.",
            remedy="nandoctor replay shows them, and tries a lower loss scale and more of the step in fp32.",
        )
    if origin.phase == "backward" and not all(stats.finite for stats in origin.inputs):
        raise NanDoctorError(
            f"The incoming gradient of {origin.op} is non-finite already, so {origin.op} is not the cause.",
            remedy="Look for a hook on its output: no operation of the backward pass made that gradient non-finite.",
        )


def _find_reader(origin: Origin, ops: Sequence[OpCall]) -> OpCall:
    """Return the first op that reads the non-finite weight, buffer or array."""
    takers = [
        (tensor.stats.finite, -(tensor.stats.absmax or 0.0) if tensor.stats.finite else 0.0, op.order)
        for op in ops
        for tensor in op.inputs
        if tensor.origin in _OUTSIDE and tensor.stats is not None and _belongs(origin, tensor.origin, tensor.path)
    ]
    if not takers:
        raise NanDoctorError("No op was seen to read the non-finite tensor.", remedy=_SEE_REPLAY)
    return ops[min(takers)[2]]


def _belongs(origin: Origin, kind: str, path: str) -> bool:
    return kind == "batch" if origin.phase == "input" else path.rpartition(".")[0] == origin.place.module


def _grow(extracted: ExtractedOps, *, wants_finite: bool) -> tuple[Program, Failure]:
    """Return the op alone or, if fp32 fails too from its rounded inputs, with the ops before it that made them."""
    orders = [extracted.target]
    program, failure = _with_failure(extracted.program(orders))
    alone = program, failure
    while wants_finite and not failure.finite_in_fp32:
        grown = next(_grown(extracted, orders, failure), None)
        if grown is None:
            return alone
        orders, program, failure = grown
    for order in sorted(orders)[:-1]:
        fewer = [other for other in orders if other != order]
        if failure.is_shown_by(pruned := extracted.program(fewer)):
            orders, program = fewer, pruned
    return program, failure


def _grown(
    extracted: ExtractedOps, orders: list[int], failure: Failure
) -> Iterator[tuple[list[int], Program, Failure]]:
    for supplier in extracted.suppliers(orders):
        with contextlib.suppress(NanDoctorError):  # leave out an op that cannot run on its own
            program, found = _with_failure(extracted.program([*orders, supplier]))
            if found.kind == failure.kind:
                yield [*orders, supplier], program, found


def _nonfinite_weight(report: Report, saved: Mapping[str, torch.Tensor]) -> Program:
    """Return a program for a file of weights alone: the non-finite tensor as saved."""
    name = next(iter((*report.dump.bad_weights, *report.dump.bad_buffers))).name
    nodes = (_node("clone_1", "torch.clone", "saved"),)
    return Program(nodes=nodes, result=Ref(name="clone_1"), leaves={"saved": saved[name]}, low=torch.float16)


def _optimizer_step(origin: Origin, moments: Sequence[SecondMoment]) -> Program:
    """Return Adam's quotient for the parameter of the origin, with zero as its first moment."""
    flushed = [moment for moment in moments if not moment.values.all()]
    moment = next((m for m in flushed if m.values.numel() == origin.elements.numel), flushed[0])
    return Program(
        nodes=(
            _node("root", "torch.sqrt", "exp_avg_sq"),
            _node("denominator", "torch.add", "root", moment.eps),
            _node("step", "torch.div", "exp_avg", "denominator"),
        ),
        result=Ref(name="step"),
        leaves={"exp_avg_sq": moment.values, "exp_avg": torch.zeros_like(moment.values)},
        low=torch.float16,
    )


def _node(name: str, function: str, *taken: str | float) -> Node:
    args = tuple(Ref(name=value) if isinstance(value, str) else value for value in taken)
    return Node(name=name, function=function, mode="plain", args=args, kwargs={})


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "dump", PurePath(report.dump.path).name
    origin = report.origin
    if origin is not None:
        yield "from", _describe(origin)
        if origin.source is not None:
            source = origin.source
            yield "line", ": ".join(filter(None, (file_line(source.file, source.line), source.text)))
    if report.cause is not None:
        yield "cause", f"{report.cause.code}: {report.cause.explanation}"
    if report.origin is None:
        yield "cause", report.headline
    yield "made by", f"nandoctor {__version__}, torch {torch.__version__}"


def _describe(origin: Origin) -> str:
    place = origin.place.with_type
    if origin.op is None:
        return f"the {'batch' if origin.phase == 'input' else f'state of {place}'}"
    return f"{origin.op} in {place}, {origin.phase}"


def run_afresh(script: str) -> str | None:
    """Run the script in a new process; return the last line of its error output, None if it succeeds."""
    done = subprocess.run([sys.executable, "-P", "-"], input=script.encode(), capture_output=True, check=False)
    if done.returncode == 0:
        return None
    return next(iter(done.stderr.decode("utf-8", "replace").splitlines()[-1:]), f"exit status {done.returncode}")
