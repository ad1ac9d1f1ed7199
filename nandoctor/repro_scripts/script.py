"""Write a program as a standalone Python script that needs only torch: the failing op, and what fp32 gives."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nandoctor.errors import NanDoctorError
from nandoctor.repro_scripts.minimize import Failure
from nandoctor.repro_scripts.program import METHOD, TESTS, Program, Ref, is_cast

_NAMES = {"nan": "NaN", "+inf": "an infinity", "-inf": "a negative infinity"}
_INDENT = "    "
_TENSOR_WIDTH = 100
_MAX_NUMEL = 20_000


def write_script(program: Program, failure: Failure, facts: Mapping[str, str]) -> str:
    """Return the script; `facts` are the labelled lines of its docstring."""
    tensors = "\n".join(f"{name} = {write_tensor(leaf)}" for name, leaf in program.leaves.items())
    head = f"{_docstring(program, failure, facts)}\n\n{_imports(program)}"
    body = f"{tensors}\n\n" + "\n".join(_checks(program, failure))
    return "\n\n\n".join([head, "\n".join(_case(program)), body]) + "\n"


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


def _imports(program: Program) -> str:
    text = " ".join([*map(write_tensor, program.leaves.values()), _call(program)])
    needed = [name for name in ("inf", "nan") if re.search(rf"\b{name}\b", text)]
    second = f"from torch import {', '.join(needed)}\n" if needed else ""
    return f'import torch\n{second}\nif torch.cuda.is_available():\n{_INDENT}torch.set_default_device("cuda")'


def _case(program: Program) -> Iterator[str]:
    low = ["*", f"low={program.low}"] if _uses_low(program) else []
    parameters = ", ".join([*program.leaves, *low])
    yield f"def case({parameters}):"
    for name in program.trained:
        yield f"{_INDENT}{name} = {name}.detach().requires_grad_()"
    if program.gradient is None:
        yield f"{_INDENT}return {_call(program)}"
        return
    yield f"{_INDENT}made = {_call(program)}"
    leaves, incoming = ", ".join(program.trained), f"{program.gradient}.to(made.dtype)"
    yield f"{_INDENT}gradients = torch.autograd.grad(made, [{leaves}], {incoming}, allow_unused=True)"
    yield f"{_INDENT}return torch.cat([g.flatten().float() for g in gradients if g is not None])"


def _uses_low(program: Program) -> bool:
    return program.mode == "product" or any(value is program.low for value in program.arguments())


def _call(program: Program) -> str:
    """Return an expression for what the op gives, with the casts that autocast makes."""
    arguments = [_argument(program, value) for value in program.args]
    arguments += [f"{name}={_argument(program, value)}" for name, value in program.kwargs.items()]
    if program.function.startswith(METHOD):
        first, *others = arguments
        copy = ".clone()" if program.function.endswith("_") else ""
        made = f"{first}{copy}.{program.function.removeprefix(METHOD)}({', '.join(others)})"
    else:
        made = f"{program.function}({', '.join(arguments)})"
    item = "" if program.item is None else f"[{program.item}]"
    return made + item + _rounding(program)


def _rounding(program: Program) -> str:
    first = program.args[0] if program.args else None
    own = f".to({first.name}.dtype)" if isinstance(first, Ref) else ""
    return {"product": ".to(low)", "rounded": own}.get(program.mode, "")


def _argument(program: Program, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(program, item) for item in value)}]"
    if not isinstance(value, Ref):
        return "low" if value is program.low else write_value(value)
    cast = {"plain": "", "product": ".to(low).float()"}.get(program.mode, ".float()")
    return value.name + cast if is_cast(program.leaves[value.name]) else value.name


def _checks(program: Program, failure: Failure) -> Iterator[str]:
    yield f"got = case({', '.join(program.leaves)})"
    yield "where = ~torch.isfinite(got)"
    yield 'print("got:", got[where])'
    yield f"assert torch.{TESTS[failure.kind].__name__}(got).any()"
    yield ""
    yield from _reference(program, failure)


def _reference(program: Program, failure: Failure) -> Iterator[str]:
    yield f"# fp32 {'is finite' if failure.finite_in_fp32 else 'fails too'}, from the same inputs."
    leaves = program.leaves.items()
    wide = [f"{name}.float()" if is_cast(leaf) and leaf.dtype != torch.float32 else name for name, leaf in leaves]
    yield f"in_fp32_throughout = case({', '.join([*wide, *(['low=torch.float32'] if _uses_low(program) else [])])})"
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
        return f"torch.full({shape}, {_write_number(values[0], tensor.dtype)}, dtype={dtype})"
    if len(values) > _MAX_NUMEL:
        raise NanDoctorError(
            f"It takes {len(values)} values to fail, too many for a script.",
            remedy="`nandoctor replay -o report.json` saves what is known about them.",
        )
    nested = _write_nested(tensor.tolist(), tensor.dtype)
    line = f"torch.tensor({nested}, dtype={dtype})"
    if len(line) <= _TENSOR_WIDTH:
        return line
    rows = textwrap.indent(textwrap.fill(nested, _TENSOR_WIDTH - 8, break_long_words=False), _INDENT)
    return f"torch.tensor(\n{rows},\n    dtype={dtype},\n)"


def write_value(value: Any) -> str:
    """Return an expression for a plain argument of an op."""
    if isinstance(value, float):
        return _write_number(value, torch.float64)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, torch.device):
        return "torch.get_default_device()"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise NanDoctorError(
        f"The op takes a {type(value).__name__}, which cannot be written as a literal.",
        remedy="`nandoctor replay -o report.json` saves what is known about the op.",
    )


def _write_nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_write_nested(value, dtype) for value in values)}]"
    return _write_number(values, dtype)


def _write_number(value: Any, dtype: torch.dtype) -> str:
    """Return the fewest digits that give the same number in its format; `inf` and `nan` by their names."""
    if not isinstance(value, float) or not math.isfinite(value):
        return repr(value)
    digits = (repr(float(f"{value:.{count}g}")) for count in range(1, 18))
    return next(text for text in digits if float(torch.tensor(float(text), dtype=dtype)) == value)
