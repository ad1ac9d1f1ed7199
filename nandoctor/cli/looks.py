"""The verbs that replay nothing, and so import neither the settings of a replay nor torch."""

from __future__ import annotations

from pathlib import Path

import click

from nandoctor.cli.shared import DumpPath, GroupedCommand, show


@click.command(cls=GroupedCommand, examples=["inspect nan.pth"])
@click.argument("dump", type=DumpPath)
def inspect(dump: Path) -> None:
    """Show what is in DUMP, without running any code of it."""
    from nandoctor.dumps.dump import summarize
    from nandoctor.dumps.reader import read_dump

    show(summarize(read_dump(dump, as_torch=False)))


@click.command(cls=GroupedCommand, examples=["explain", "explain eps-underflow"])
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain what a cause is, why it happens and how it is fixed; without CODE, list all causes."""
    from nandoctor.causes.registry import find_page, list_pages

    show(list_pages() if code is None else find_page(code))
