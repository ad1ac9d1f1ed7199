"""The verbs for a single dump, or a cause: each parses, calls, renders and exits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nandoctor.cli.failures import EXIT_CANNOT_TELL, EXIT_INTERRUPTED, exit_code_answers, tell
from nandoctor.cli.shared import (
    MODEL_AND_STEP,
    DumpPath,
    GroupedCommand,
    OutputConsole,
    call,
    file_option,
    json_option,
    settings_options,
    show,
    wrong_usage,
)
from nandoctor.evidence.codec import to_json
from nandoctor.views.save import ENDINGS, PICTURE_ENDINGS, check_target, save, write_text

if TYPE_CHECKING:
    from nandoctor.evidence.report import Report

EXIT_NOT_REPRODUCED = 3


@click.command(
    cls=GroupedCommand,
    epilog="\b\n"
    "nandoctor replay nan.pth --model train.py:make_model\n"
    "nandoctor replay nan.pth --model train.py:make_model --loss train.py:loss -o report.html\n",
)
@click.argument("dump", type=DumpPath, is_eager=True)
@file_option(
    "outputs", ENDINGS, "Also write .html (a page), .md (for an issue), .json, .png, .svg or .pdf.", multiple=True
)
@json_option
@click.option(
    "--check", is_flag=True, help="For git bisect run: exit 0 fixed or healthy, 1 still fails, 125 cannot tell."
)
@settings_options(*MODEL_AND_STEP, "fixes")
def replay(dump: Path, outputs: tuple[Path, ...], as_json: bool, check: bool, **options: Any) -> None:
    """Replay DUMP under CUDA's autocast and in fp32, name what makes the first NaN or Inf, and find a fix.

    Exit: 0 analysed, 1 an error, 2 wrong usage, 3 the NaN did not come back or not all was seen, 130 interrupted.
    """
    if check:
        with exit_code_answers():
            verification, report = call("check", dump, options)
            _write_all(report, outputs, as_json=as_json)
        if verification.exit_code == EXIT_CANNOT_TELL:
            tell(f"nandoctor: cannot tell: {verification.headline}")
        sys.exit(verification.exit_code)
    from nandoctor.views.progress import ReplayDisplay
    from nandoctor.views.report import report_document

    output = None if as_json else OutputConsole(file=sys.stdout)  # before what a model prints is redirected
    display = ReplayDisplay(output)
    report = call("replay", dump, options, display).report
    try:
        display.tell_rest(report_document(report))
    finally:  # the reader of the screen may have gone, as `head` does
        _write_all(report, outputs, as_json=as_json)
    if display.interrupted:
        click.echo("nandoctor: interrupted; the report has what was found until then", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_NOT_REPRODUCED if report.verdict in ("not-reproduced", "cannot-tell") else 0)


@click.command(
    cls=GroupedCommand,
    epilog="\b\n"
    "nandoctor plot nan.pth --model train.py:make_model\n"
    "nandoctor plot nan.pth --model train.py:make_model -o ranges.svg\n",
)
@click.argument("dump", type=DumpPath, is_eager=True)
@file_option("file", PICTURE_ENDINGS, "Default: the dump's name with .ranges.png, in the working directory.")
@settings_options(*MODEL_AND_STEP)
def plot(dump: Path, file: Path | None, **options: Any) -> None:
    """Replay DUMP, and plot what every layer's values span, against what the format can hold."""
    if file is None:
        file = Path(f"{dump.stem}.ranges.png")
        with wrong_usage():
            check_target(file, PICTURE_ENDINGS)
    _write_all(call("replay", dump, {**options, "fixes": False}).report, (file,))


@click.command(cls=GroupedCommand, epilog="\b\nnandoctor repro nan.pth --model train.py:make_model -o repro.py")
@click.argument("dump", type=DumpPath, is_eager=True)
@file_option("file", (".py",), "Write the script there instead of printing it.")
@settings_options(*MODEL_AND_STEP)
def repro(dump: Path, file: Path | None, **options: Any) -> None:
    """Write a script with the operation that fails in DUMP, and the smallest tensors that show it; it needs only torch.

    It also shows what fp32 gives. It was run before it is given.
    """
    script = call("repro", dump, options)
    if file is None:
        click.echo(script, nl=False)
        return
    write_text(script, file)
    tell(f"Wrote {file}")


def _write_all(report: Report, outputs: tuple[Path, ...], *, as_json: bool = False) -> None:
    for path in outputs:
        save(report, path)
        tell(f"Wrote {path}")
    if as_json:
        click.echo(to_json(report))


@click.command(cls=GroupedCommand, epilog="\b\nnandoctor inspect nan.pth")
@click.argument("dump", type=DumpPath)
def inspect(dump: Path) -> None:
    """Show what is in DUMP, without running any code of it."""
    from nandoctor.dumps.dump import summarize
    from nandoctor.dumps.reader import read_dump
    from nandoctor.views.inspect_dump import inspection_document

    show(inspection_document(summarize(read_dump(dump, as_torch=False))))


@click.command(cls=GroupedCommand, epilog="\b\nnandoctor explain\nnandoctor explain eps-underflow")
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain what a cause is, why it happens and how it is fixed; without CODE, list all causes."""
    from nandoctor.causes.registry import find_page, list_pages
    from nandoctor.views.explain import catalogue_document, cause_document

    show(catalogue_document(list_pages()) if code is None else cause_document(find_page(code)))
