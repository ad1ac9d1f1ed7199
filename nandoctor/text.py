"""Formats numbers, counts, places and names for people to read.

Strings that come from a dump or a model cannot be trusted: they are made printable.
"""

from __future__ import annotations

import ast
import math
import re
import reprlib
import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

_KINDS = {"nan": "NaN", "+inf": "+Inf", "-inf": "-Inf"}
_BRIEF_WIDTH = 120
_CODE_WIDTH = 60
_SCREEN_LINES, _SCREEN_WIDTH = 30, 3_000
_MAX_LISTED = 12
_MAX_SAMPLES = 3
_LEAST_SHARE = 1e-5
_UNITS = ("kB", "MB", "GB", "TB")
MAX_SAMPLES_LISTED = 64
"""At most so many affected samples of a tensor are listed; a list of this length may be incomplete."""


def number(value: float | None, *, unlike: float | None = None) -> str:
    """Format a measured value: whole from 1,000 on (65,504), else three significant digits (0.0312, 6.3e7, 5.96e-8).

    If the text must differ from that of another value, `unlike`, it gets as many more digits as that takes: 1.0001.
    """
    if value is None:
        return "?"
    # 17 significant digits tell any two float64 apart.
    unequal = (it for it in range(3, 18) if unlike is None or _to_digits(value, it) != _to_digits(unlike, it))
    return _to_digits(value, next(unequal, 3))


def _to_digits(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    magnitude = abs(value)
    if 999.5 <= magnitude < 999_999.5 or (magnitude < 1e7 and magnitude >= 1000 and value == round(value)):
        return f"{value:,.{max(digits - len(f'{magnitude:.0f}'), 0)}f}"
    return _plain_exponent(f"{value or 0.0:.{digits}g}")  # no sign for a zero


def _plain_exponent(text: str) -> str:
    """Return 1e-8 for Python's 1e-08, 6.3e7 for 6.3e+07."""
    mantissa, has_exponent, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if has_exponent else mantissa


def constant(value: float) -> str:
    """Format a number as in code, to six digits and without separators: 1e-8, 1e-4, 0.01, -65504, 1e9."""
    text = _plain_exponent(f"{value:.6g}")
    if not 1e-3 <= abs(value) < 1e6 and math.isfinite(value) and value:
        digits, _, exponent = f"{value:.5e}".partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return text


def percent(share: float | None) -> str:
    """Format a share or relative error with two significant digits, as 100 % only if it is all: 0.44 %, 18 %, 99.9 %.

    A share that is too small to matter becomes "<0.001 %".
    """
    if share is None:
        return "?"
    if 0 < share < _LEAST_SHARE:
        return f"<{percent(_LEAST_SHARE)}"
    value = 100 * share
    if 99.5 <= value < 100:
        return "99.9 %"
    if 10 <= value < 99.5:
        return f"{value:.0f} %"
    return f"{number(round(value)) if 100 <= value < 1e7 else _plain_exponent(f'{value:.2g}')} %"


def within(share: float | None) -> str:
    """Format a bound on an error: "within 0.44 %", and never less than "within 0.001 %"."""
    return f"within {percent(share).removeprefix('<')}"


def excess(value: float, limit: float) -> str:
    """Say how far a magnitude passes a limit, before "what fp16 can hold": "0.4 % above", "3.2x"."""
    ratio = abs(value) / limit
    if ratio <= 1:
        return f"{percent(ratio)} of"
    return f"{percent(ratio - 1)} above" if ratio < 2 else f"{number(float(f'{ratio:.2g}'))}x"


def bits_text(headroom: float | None) -> str:
    """Format headroom in bits: "12.5"; "Inf" for a layer that is zero throughout, "-" if it is unknown."""
    if headroom is None:
        return "-"
    return "Inf" if headroom == math.inf else f"{headroom:.1f}"


def code(text: str) -> str:
    """Format source code for a sentence: in backticks, on one line, at most 60 characters."""
    return f"`{brief(' '.join(text.replace('`', chr(39)).split()), _CODE_WIDTH)}`"


def split_code(text: str) -> list[tuple[str, bool]]:
    """Split a sentence into parts, each with True if it was in backticks; unpaired backticks are plain text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [(text, False)]
    return [(part, place % 2 == 1) for place, part in enumerate(parts) if part]


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 row", "8,192 elements", "2 batches"."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def part_of(part: int, whole: int, noun: str = "") -> str:
    """Say how many of how many: "8,192 of 32,768", "8 of 32 values", "1 of 1 value"."""
    return f"{part:,} of {plural(whole, noun) if noun else f'{whole:,}'}"


def are(count: int) -> str:
    """Return the verb for a count: "1 value is", "2 values are"."""
    return "is" if count == 1 else "are"


def ordinal(place: int) -> str:
    """Return the ordinal of a place counted from 1: 1st, 2nd, 3rd, 11th."""
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def call_label(name: str, call: int, type_name: str = "") -> str:
    """Format a module call, `call` counted from 0: "norm (2nd call)", "norm (LayerNorm, 2nd call)"."""
    notes = [*([type_name] if type_name else []), *([f"{ordinal(call + 1)} call"] if call else [])]
    return f"{name} ({', '.join(notes)})" if notes else name


def file_line(file: str, line: int) -> str:
    """Format a line of code by the file's own name: "net.py:45"."""
    return f"{file_name(file)}:{line}"


def file_name(file: str) -> str:
    """Return a cell as `cell_name` does, or the file's own name; the path may be of another operating system."""
    return printable(cell_name(file) or file.replace("\\", "/").rpartition("/")[2])


def cell_name(file: str) -> str:
    """Return IPython's name for the cell behind a code object's file, such as "cell In[3]"; "" for a file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    describe = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    kind, name = describe(file) or ("", "")
    return f"{kind.lower()} {name}" if name else ""


def relative_path(file: str | Path) -> str:
    """Return the path as one would type it here: relative if the file lies in the working directory; or the cell."""
    here = Path.cwd()
    path = here / file  # not looked up: the name may come from a dump
    return cell_name(str(file)) or (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def samples_text(samples: Sequence[int], batch_size: int | None = None) -> str:
    """Format indexes into the batch: "sample 2", "samples 0, 2, 5 and 9 more", "every sample".

    With `batch_size` they are those of a tensor, which lists no more than 64: "and at least 61 more".
    """
    if len(samples) == batch_size:
        return "every sample"
    text = f"sample{'s' * (len(samples) != 1)} {join_first([str(sample) for sample in samples], _MAX_SAMPLES)}"
    is_cut = batch_size is not None and len(samples) == MAX_SAMPLES_LISTED
    return text.replace(" and ", " and at least ") if is_cut else text


def dtype_name(dtype: object) -> str:
    """Return the name of a `torch.dtype` without the module: "float16"."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape as torch prints it: [4, 16, 32, 32]; "scalar" for one without dimensions."""
    return f"[{', '.join(map(str, sizes))}]" if (sizes := tuple(shape)) else "scalar"


def kinds_text(kinds: Iterable[str]) -> str:
    """Name kinds of non-finite values: "NaN and +Inf"."""
    return join_words([_KINDS.get(kind, printable(kind)) for kind in kinds]) or "non-finite values"


def nonfinite_part(kinds: Iterable[str], num_bad: int, numel: int, noun: str = "") -> str:
    """Say how many of a tensor's values are non-finite: "NaN in 8 of 32", "some of 32 values" if none was counted."""
    if not num_bad:
        return f"some of {plural(numel, noun) if noun else f'{numel:,}'}"
    return f"{kinds_text(kinds)} in {part_of(num_bad, numel, noun)}"


def byte_size(nbytes: int) -> str:
    """Format a file's size in decimal units: 812 bytes, 1.25 MB."""
    if nbytes < 1000:
        return plural(nbytes, "byte")
    power = min((len(str(nbytes)) - 1) // 3, len(_UNITS))
    return f"{number(nbytes / 1000**power)} {_UNITS[power - 1]}"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Join a list as prose: "a", "a and b", "a, b and c"."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def join_first(words: Sequence[str], limit: int = _MAX_LISTED) -> str:
    """Join as `join_words`, with the words past `limit` only counted: "a, b and 9 more"."""
    left = len(words) - limit
    return join_words([*words[:limit], f"{left:,} more"] if left > 0 else words)


def printable(text: str) -> str:
    r"""Return the text on one line, with every character that is not plainly visible written as an escape.

    A module or array may have any name: a terminal escape (`\x1b`) would run on the reader's terminal, a newline
    would break the layout, a direction override would show another name.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_code(line: str) -> str:
    """Return a line of code, printable and otherwise unchanged: tabs stay, so that it can be copied as written."""
    return "\t".join(map(printable, line.split("\t")))


def shorten(text: str, width: int) -> str:
    """Cut the text in its middle to at most `width` characters, most of them from its end, where siblings differ."""
    if len(text) <= width:
        return text
    kept = max(width - 1, 0)
    tail = kept - kept // 3
    return f"{text[: kept - tail]}…{text[len(text) - tail :]}"


def mode_text(seed: int | None, *training: bool) -> str:
    """Format the modes and random numbers of runs, in the same words everywhere: "train and eval mode, seed 0"."""
    modes = dict.fromkeys("train" if flag else "eval" for flag in training)
    return f"{' and '.join(modes)} mode, {'the saved random state' if seed is None else f'seed {seed}'}"


def brief(text: str, width: int = _BRIEF_WIDTH) -> str:
    """Return untrusted text, printable and at most `width` characters long."""
    return shorten(printable(shorten(text, width)), width)  # cut first: a file may hold a name of many megabytes


_short = reprlib.Repr()
for _limit in ("list", "tuple", "set", "frozenset", "dict", "string", "long", "other"):
    setattr(_short, f"max{_limit}", _BRIEF_WIDTH)


def brief_value(value: Any) -> str:
    """Return an untrusted value as brief text; of a list that may be endless, the first items alone become text."""
    return brief(value if isinstance(value, str) else _short.repr(value))


def screenful(text: str) -> str:
    """Return untrusted text, printable but for its ends of lines, of which it keeps no more than fill a screen."""
    lines = text.split("\n")
    left = len(lines) - _SCREEN_LINES
    lines = [*lines[:_SCREEN_LINES], f"… {plural(left, 'more line')}"] if left > 0 else lines
    shown = shorten("\n".join(lines), _SCREEN_WIDTH).split("\n")
    return shorten("\n".join(map(printable, shown)), _SCREEN_WIDTH)


def brief_list(names: Iterable[str]) -> str:
    """List untrusted names: the first dozen, and how many more there are."""
    return join_first([brief(name) for name in names])


_VALUE = r"""'[^']*'|(?:none|train|eval|cuda)(?![\w:/=]|\.\w)|(?=\S*(?:[A-Z\d=*/]|[.:]\w))[^\s`]*[^\s`.,;:)]"""
_OPTION = re.compile(rf"--([a-z]+(?:-[a-z]+)*)(?: ({_VALUE}))?")
_SAID = re.compile(rf"`[^`]*`|nandoctor [a-z]+ .*|({_OPTION.pattern}(?: {_OPTION.pattern})*)")


def in_python(text: str) -> str:
    """Return a sentence in which the keywords of the Python API stand for the options of the command line.

    `--loss train.py:loss` becomes `loss="train.py:loss"`, `--model-arg K=V` `model_args={"K": "V"}`, `--no-strict`
    `strict=False`, and an option without its value `seed=`. Commands and code in backticks stay as they are.
    """
    return _SAID.sub(lambda found: _keywords(found[1]) if found[1] else found[0], text)


def _keywords(options: str) -> str:
    return ", ".join(starmap(_keyword, _OPTION.findall(options))).replace("}, model_args={", ", ")


def _keyword(option: str, value: str) -> str:
    name, text = option.replace("-", "_"), value.strip("'")
    if name == "model_arg":
        key, _, text = text.partition("=")
        return f'model_args={{"{key}": {_literal(text)}}}' if key else "model_args="
    return f"{name.removeprefix('no_')}={'False' if name.startswith('no_') else _literal(text)}"


def _literal(text: str) -> str:
    """Return the text after an option as Python has it: a number or another literal, or a string; "" for none."""
    try:
        return repr(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return f'"{text}"' if text else ""


def diff_kind(line: str) -> str:
    """Return the kind of a line of a diff: "file", "hunk", "add", "del", or "" for an unchanged one."""
    if line.startswith(("---", "+++")):
        return "file"
    return {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "")
