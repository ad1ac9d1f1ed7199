"""Extract the op of an origin from a run, with its tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

from nandoctor.autocast.policy import torch_dtype
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Origin
from nandoctor.evidence.trace import OpCall
from nandoctor.repro_scripts.program import METHOD, Mode, Program, Ref, kinds_of
from nandoctor.torch_compat import is_wrapped, schema_of, tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation

_GRADIENT = "grad"
_LEAF_NAMES = {
    **dict.fromkeys(("self", "input", "tensors[0]"), "x"),
    **dict.fromkeys(("other", "mat2", "tensor2", "vec2", "tensors[1]"), "y"),
}
_NO_SEED_OF_A_STEP = (1 << 31) - 1


def extract_op(step: FailingStep, origin: Origin) -> Program:
    """Run the step once more, and return its failing op with its tensors, and its incoming gradient if that fails.

    Raise NanDoctorError if the op took tensors that cannot be written as literals, such as sparse or complex ones.
    """
    key, backward = (*origin.place.key, origin.op, origin.nth), origin.phase == "backward"
    found: list[tuple[Program, Invocation, list[torch.Tensor]]] = []
    refused: list[NanDoctorError] = []
    gradients: dict[int, torch.Tensor] = {}

    def keep(op: OpCall, call: Invocation, output: Any) -> None:
        if op.key != key or found or refused or origin.function is not None:
            return
        given = tree_tensors(output)
        try:
            found.append((_make_program(call, torch_dtype(step.low)), call, list(map(_copy, given))))
        except NanDoctorError as error:  # raised here, it would be mistaken for the model's own
            refused.append(error)
        if backward:
            _await_gradient(given, gradients)

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
        raise NanDoctorError(
            f"The op took or gave a tensor that is {kind}, which cannot be written as a literal.",
            remedy="`nandoctor replay -o report.json` saves what is known about it.",
        )
    return tensor.detach().resolve_neg().to("cpu", copy=True)


def _await_gradient(given: Sequence[torch.Tensor], gradients: dict[int, torch.Tensor]) -> None:
    """Keep the first gradient that comes back, by the index of the result that it belongs to."""

    def on_gradient(item: int, values: torch.Tensor) -> None:
        if not gradients:
            gradients[item] = values.detach().cpu().clone()

    for item, tensor in enumerate(given):
        if tensor.requires_grad:
            tensor.register_hook(partial(on_gradient, item))  # type: ignore[no-untyped-call]


def _make_program(call: Invocation, low: torch.dtype) -> Program:
    """Return the op with its arguments, whose tensors become leaves; its function is not known yet."""
    leaves: dict[str, torch.Tensor] = {}

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = [name for name, leaf in leaves.items() if leaf is value]
            name = known[0] if known else _free_name(_LEAF_NAMES.get(name, name), leaves)
            leaves[name] = value
            return Ref(name)
        if isinstance(value, (list, tuple)):
            return [argument(f"{name}[{index}]", item) for index, item in enumerate(value)]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    schema = schema_of(call.op)
    names = [parameter.name for parameter in schema.arguments]
    args = tuple(argument(name, value) for name, value in zip(names, call.args, strict=False))
    kwargs = {name: argument(name, value) for name, value in call.kwargs.items()}
    # Only a detached copy is left of a tensor that the op writes to.
    writes = schema.is_mutable
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
    for mode in get_args(Mode):
        for function in _functions(call):
            candidate = replace(program, function=function, mode=mode)
            if _gives(candidate, given):
                return candidate
    raise NanDoctorError(
        f"{call.name} gives another result alone than in the step, so no script can show it.",
        remedy="It may draw random numbers, or be an op of another library: report it there with "
        "`nandoctor replay -o report.json`.",
    )


def _functions(call: Invocation) -> Iterator[str]:
    """Yield names of functions that may call the op, the most common first."""
    name, raw = call.name, schema_of(call.op).name.partition("::")[2]
    yield from (f"torch.{place}{name}" for place in ("", "nn.functional.", "special.", "linalg."))
    yield f"torch.linalg.{name.removeprefix('linalg_')}"
    yield f"{METHOD}{raw}"
    yield str(call.op).replace("aten.", "torch.ops.aten.", 1)


def _gives(program: Program, theirs: torch.Tensor) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_NO_SEED_OF_A_STEP)  # whatever is drawn has to give the same
            ours = program.result()
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
    except NanDoctorError:
        raise
    except Exception:  # an argument or a dtype that this function rejects
        return False
    if not torch.equal(torch.isfinite(ours), torch.isfinite(theirs)):
        return False
    return torch.allclose(ours.double(), theirs.double(), rtol=2e-2, atol=1e-4, equal_nan=True)
