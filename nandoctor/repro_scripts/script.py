"""Write a program as a standalone Python script that needs only torch: the failing op, and what fp32 gives."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nandoctor.errors import NanDoctorError
from nandoctor.repro_scripts.minimize import Failure
from nandoctor.repro_scripts.program import INDENT, METHOD, TESTS, Program, is_cast, write_number

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
