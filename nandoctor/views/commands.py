"""The commands to type next, with all the flags of the replay."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nandoctor.dumps.recorded_format import as_option
from nandoctor.evidence.report import Fix, Report
from nandoctor.source_files import PACKAGE_FOLDERS
from nandoctor.step.settings import OPTIONS
from nandoctor.text import printable
from nandoctor.views.blocks import Fact

_COMMAND = re.compile(r"(.*?)(?:(?:^|(?<=:) )(nandoctor [a-z]+ .+))?$", re.DOTALL)


def command_arguments(dump: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a person types to replay the dump with these settings: its path, then the flags.

    Return () if a setting is an object that a command line cannot name.
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
    """Return the command for another verb on the report's dump, with `rest` at the end; None if none can express it."""
    if not report.arguments:
        return None
    return " ".join(["nandoctor", verb, *(shlex.quote(printable(word)) for word in report.arguments), *rest])


def next_facts(report: Report, *, page: bool = True) -> list[Fact]:
    """Return what to do and type next, besides applying a fix; `page` includes how to make the page."""
    facts = list(step_facts(report.next_steps))
    explain = f"nandoctor explain {report.cause.code}" if report.cause is not None else None
    commands = filter(None, (explain, command_for("replay", report, "-o report.html") if page else None))
    return [*facts, *(Fact("more", command, is_command=True) for command in commands)]


def step_facts(steps: Sequence[str]) -> Iterator[Fact]:
    """Yield the next steps; a command at the end of a sentence becomes a fact of its own, to be copied."""
    for step in steps:
        sentence, command = _COMMAND.match(printable(step)).groups()  # type: ignore[union-attr]
        if sentence:
            yield Fact("next", sentence)
        if command:
            yield Fact("next", command, is_command=True)


def write_flags(fix: Fix) -> tuple[str, ...]:
    """Return the flags of `nandoctor fix` that write the change, if need be to files of an installed package."""
    names = re.findall(r"^\+\+\+ b/(.*)$", fix.patch, re.MULTILINE)
    installed = any(PACKAGE_FOLDERS.intersection(Path(fix.patch_root or "", name).parts) for name in names)
    return ("--write", "--allow-installed") if installed else ("--write",)
