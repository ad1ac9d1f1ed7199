"""The next commands to type, complete: with the dump's path and the flags that its replay was given."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nandoctor.dumps.code_request import as_option
from nandoctor.evidence.report import Report
from nandoctor.renderers.facts import Fact
from nandoctor.replaying.settings import OPTIONS
from nandoctor.text import printable

_COMMAND = re.compile(r"(.*?)(?:(?:^|(?<=:) )(nandoctor [a-z]+ .+))?$", re.DOTALL)


def command_arguments(dump: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """What a person types to replay the dump with these settings: its path, then the flags.

    Empty where a setting was given as an object, which no command line can name.
    """
    arguments = [str(dump)]
    for name, value in given.items():
        option = OPTIONS[name]
        if value is None or option.group not in ("model", "step"):
            continue
        if isinstance(value, Mapping):
            texts = {key: as_option(item) for key, item in value.items()}
            if None in texts.values():
                return ()
            for key, text in texts.items():
                arguments += [option.flag, f"{key}={text}"]
        elif isinstance(value, bool):
            arguments += [option.flag] if value != option.flag.startswith("--no-") else []
        elif isinstance(value, str | int | float | os.PathLike):
            arguments += [option.flag, str(value)]
        elif isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            arguments += [option.flag, ",".join(value)]
        else:
            return ()
    return tuple(arguments)


def command_for(verb: str, report: Report, *rest: str) -> str | None:
    """What runs another verb on the dump of the report, with `rest` at the end; None where no line can say it."""
    if not report.arguments:
        return None
    return " ".join(["nandoctor", verb, *(shlex.quote(printable(word)) for word in report.arguments), *rest])


def next_facts(report: Report, *, page: bool = True) -> list[Fact]:
    """What to do and to type next, besides applying a fix; without the `page` where the reader has one."""
    facts = list(step_facts(report.next_steps))
    explain = f"nandoctor explain {report.cause.code}" if report.cause is not None else None
    commands = filter(None, (explain, command_for("replay", report, "-o report.html") if page else None))
    return [*facts, *(Fact(label="more", text=command, is_command=True) for command in commands)]


def step_facts(steps: Sequence[str]) -> Iterator[Fact]:
    """What to do next; a command at the end of a sentence stands on a line of its own, to be copied."""
    for step in steps:
        sentence, command = _COMMAND.match(printable(step)).groups()  # type: ignore[union-attr]
        if sentence:
            yield Fact(label="next", text=sentence)
        if command:
            yield Fact(label="next", text=command, is_command=True)
