"""Build the script of `nandoctor repro`: the failing op, with its tensors sliced as far as it still fails.

The op is taken from another run of the step. The script needs only torch, shows what fp32 gives too, and is run before
it is returned.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, get_args

import torch

from nandoctor import __version__
from nandoctor.autocast.policy import torch_dtype
from nandoctor.diagnosis.growth import key_of
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import NOTHING_FOUND, Origin, Report
from nandoctor.evidence.trace import OpCall
from nandoctor.repro_scripts.program import (
    INDENT,
    METHOD,
    TESTS,
    Failure,
    Mode,
    Program,
    Ref,
    find_failure,
    is_cast,
    kinds_of,
    no_script,
    shrink,
    write_number,
)
from nandoctor.text import file_line, printable
from nandoctor.torch_compat import is_wrapped, schema_of, tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation

_FINITE_IN_FP32 = ("precision", "silent", "loss-scale")
_NOT_AN_OP = ("state", "input", "optimizer")
_SEE_REPLAY = "`nandoctor replay` shows what happened, and what could be tried."


def make_script(report: Report, step: FailingStep | None) -> str:
    """Return a script that fails as the report says and needs only torch.

    Raise NanDoctorError if no operation makes the failure, or if only the project's own code can show it.
    """
    if report.verdict in NOTHING_FOUND:
        raise NanDoctorError("Nothing non-finite occurred in the replay.", remedy=_SEE_REPLAY)
    origin = report.origin
    # A gradient that is non-finite already where it comes in was made so by a hook, or by a sum of several.
    comes_in = origin is not None and origin.phase == "backward" and not all(stats.finite for stats in origin.inputs)
    if step is None or origin is None or origin.phase in _NOT_AN_OP or comes_in:
        reason = f"{report.headline[0].upper()}{report.headline[1:].rstrip('.')}"
        raise NanDoctorError(f"No operation of the model makes this failure. {reason}.", remedy=_SEE_REPLAY)
    program = _extract_op(step, origin)
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
            raise no_script(f"The script does not fail on its own ({printable(complaint)}).")
    return script


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
    said = done.stderr.decode("utf-8", "replace").splitlines() or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else None


_GRADIENT = "grad"
_LEAF_NAMES = {
    **dict.fromkeys(("self", "input", "tensors[0]"), "x"),
    **dict.fromkeys(("other", "mat2", "tensor2", "vec2", "tensors[1]"), "y"),
}
_NO_SEED_OF_A_STEP = (1 << 31) - 1


def _extract_op(step: FailingStep, origin: Origin) -> Program:
    """Run the step once more, and return its failing op with its tensors, and its incoming gradient if that fails.

    Raise NanDoctorError if the op took tensors that cannot be written as literals, such as sparse or complex ones.
    """
    key, backward = key_of(origin), origin.phase == "backward"
    found: list[tuple[Program, Invocation, list[torch.Tensor]]] = []
    refused: list[NanDoctorError] = []
    gradients: dict[int, torch.Tensor] = {}  # the first that comes back, by the index of its result

    def keep_gradient(item: int, values: torch.Tensor) -> None:
        if not gradients:
            gradients[item] = values.detach().cpu().clone()

    def keep(op: OpCall, call: Invocation, output: Any) -> None:
        if op.key != key or found or refused or origin.function is not None:
            return
        given = tree_tensors(output)
        try:
            found.append((_make_program(call, torch_dtype(step.low)), call, list(map(_copy, given))))
        except NanDoctorError as error:  # raised here, it would be mistaken for the model's own
            refused.append(error)
        for item, tensor in enumerate(given):
            if backward and tensor.requires_grad:
                tensor.register_hook(partial(keep_gradient, item))  # type: ignore[no-untyped-call]

    step.run(watch=Watch(stage="repro", ops=True, backward=backward, on_op=keep))
    if refused:
        raise refused[0]
    if backward and not found:
        raise NanDoctorError(
            f"{origin.function or origin.op} is a custom autograd Function: only the project's own code can show it.",
            remedy="Call the Function alone, with torch.autograd.gradcheck or a gradient of the size in the report.",
        )
    if not found or (backward and not gradients):
        raise NanDoctorError(
            f"{origin.op} was not seen again in a second run.",
            remedy="The step gives different results from run to run: pass --seed, and make the forward deterministic.",
        )
    program, call, given = found[0]
    nonfinite = (index for index, made in enumerate(given) if made.is_floating_point() and kinds_of(made))
    item = next(iter(gradients), next(nonfinite, 0))
    if gradients:
        program = replace(program.with_values(**{_GRADIENT: gradients[item]}), gradient=_GRADIENT)
    return _find_function_and_mode(replace(program, item=item if len(given) > 1 else None), call, given[item])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "complex": tensor.is_complex()}
    kinds |= {"sparse": tensor.layout != torch.strided, "torch.func's": is_wrapped(tensor)}
    for kind in (kind for kind, is_kind in kinds.items() if is_kind):
        raise no_script(f"The op took or gave a tensor that is {kind}, which cannot be written as a literal.")
    return tensor.detach().resolve_neg().to("cpu", copy=True)


def _make_program(call: Invocation, low: torch.dtype) -> Program:
    """Return the op with its arguments, whose tensors become leaves; its function is not known yet."""
    leaves: dict[str, torch.Tensor] = {}

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = next((leaf_name for leaf_name, leaf in leaves.items() if leaf is value), None)
            name = known or _free_name(_LEAF_NAMES.get(name, name), leaves)
            leaves[name] = value
            return Ref(name)
        if isinstance(value, (list, tuple)):
            return [argument(f"{name}[{index}]", item) for index, item in enumerate(value)]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args = tuple(argument(name, value) for name, value in zip(call.signature.arguments, call.args, strict=False))
    kwargs = {name: argument(name, value) for name, value in call.kwargs.items()}
    writes = call.signature.is_mutable  # only a detached copy is left of a tensor that it writes to
    return Program(
        function="",
        mode="plain",
        args=args,
        kwargs=kwargs,
        leaves={name: _copy(leaf) for name, leaf in leaves.items()},
        low=low,
        trained=tuple(n for n, leaf in leaves.items() if leaf.is_floating_point() and (leaf.requires_grad or writes)),
    )


def _free_name(wanted: str, used: Iterable[str]) -> str:
    name, taken = re.sub(r"\W", "_", wanted).strip("_"), {_GRADIENT, *used}
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def _find_function_and_mode(program: Program, call: Invocation, given: torch.Tensor) -> Program:
    """Return the program with the function and the mode that alone give the op's result in the run."""
    functions = (  # the most common first
        *(f"torch.{place}{call.name}" for place in ("", "nn.functional.", "special.")),
        f"torch.linalg.{call.name.removeprefix('linalg_')}",
        f"{METHOD}{schema_of(call.op).name.partition('::')[2]}",
        str(call.op).replace("aten.", "torch.ops.aten.", 1),
    )
    for mode, function in itertools.product(get_args(Mode), functions):
        candidate = replace(program, function=function, mode=mode)
        if _gives(candidate, given):
            return candidate
    raise NanDoctorError(
        f"{call.name} gives another result alone than in the step, so no script can show it.",
        remedy="It may draw random numbers, or be an op of another library: report it there with "
        "`nandoctor replay -o report.json`.",
    )


def _gives(program: Program, theirs: torch.Tensor) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_NO_SEED_OF_A_STEP)  # whatever is drawn has to give the same
            ours = replace(program, gradient=None).run()
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
    except NanDoctorError:
        raise
    except Exception:  # an argument or a dtype that this function rejects
        return False
    if not torch.equal(torch.isfinite(ours), torch.isfinite(theirs)):
        return False
    return torch.allclose(ours.double(), theirs.double(), rtol=2e-2, atol=1e-4, equal_nan=True)


_NAMES = {"nan": "NaN", "+inf": "An infinity", "-inf": "A negative infinity"}
_TENSOR_WIDTH = 100
_MAX_NUMEL = 20_000


def write_script(program: Program, failure: Failure, facts: Mapping[str, str]) -> str:
    """Return the script; `facts` are the labelled lines of its docstring."""
    tensors = "\n".join(f"{name} = {write_tensor(leaf)}" for name, leaf in program.leaves.items())
    needed = [name for name in ("inf", "nan") if re.search(rf"\b{name}\b", f"{tensors} {program.text}")]
    second = f"from torch import {', '.join(needed)}\n" if needed else ""
    imports = f'import torch\n{second}\nif torch.cuda.is_available():\n{INDENT}torch.set_default_device("cuda")'
    body = f"{tensors}\n\n" + "\n".join(_checks(program, failure))
    width = max(map(len, facts), default=0)
    lines = "\n".join(f"{label:<{width}}  {_printable(text)}" for label, text in facts.items())
    where = "in the gradients of" if program.gradient else "from"
    what = f"{_NAMES[failure.kind]} {where} {program.function.replace(METHOD, 'torch.Tensor.')}"
    last = "Needs torch alone, on a CPU or with CUDA; exits with 0 if it fails as stated."
    docstring = f'"""{what}: the smallest case.\n\n{lines}\n\n{last}\n"""'
    return "\n\n\n".join([f"{docstring}\n\n{imports}", program.text, body]) + "\n"


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
        raise no_script(f"It takes {len(values)} values to fail, too many for a script.")
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
