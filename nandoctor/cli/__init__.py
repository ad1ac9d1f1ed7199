"""The command line: what stands behind `nandoctor`."""

from nandoctor.cli.commands import main

__all__ = ["main"]
