"""The verb for what has not failed yet, `checkup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nandoctor.cli.failures import tell
from nandoctor.cli.options import MODEL_AND_STEP, GroupedCommand, file_option, force_option, settings_options
from nandoctor.cli.shared import console, json_option

_File = click.Path(path_type=Path)


@click.command(
    cls=GroupedCommand,
    examples=[
        "checkup step9000.pth --batch batch.pth --model train.py:make_model",
        "checkup runs/a/step*.pth --batch batch.pth --model train.py:make_model -o checkup.html",
    ],
)
@click.argument("checkpoints", metavar="CHECKPOINT...", type=_File, nargs=-1, required=True, is_eager=True)
@force_option
@click.option("--batch", type=_File, metavar="FILE", help="The batch to run (default: that of the checkpoint's file).")
@file_option("file", (".html", ".json"), "Write .html or .json.")
@json_option
@settings_options(*MODEL_AND_STEP)
def checkup(
    checkpoints: tuple[Path, ...], batch: Path | None, file: Path | None, as_json: bool, **options: Any
) -> None:
    """Show how close a healthy step comes to overflow and underflow, and with several checkpoints when it will."""
    from nandoctor.margins import checkup as run_checkup
    from nandoctor.renderers.checkup import checkup_page, print_checkup
    from nandoctor.renderers.jsonfile import dumps
    from nandoctor.renderers.save import write_text

    found = run_checkup(checkpoints, options.pop("model"), batch=batch, **options)
    if as_json:
        click.echo(dumps(found))
    else:
        print_checkup(found, console())
    if file is not None:
        write_text(checkup_page(found) if file.suffix == ".html" else dumps(found) + "\n", file)
        tell(f"Wrote {file}")
