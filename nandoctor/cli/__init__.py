"""The command line: what stands behind `nandoctor`.

In: arguments. Out: text on standard output, notes and progress on standard error, an exit code.
"""

from nandoctor.cli.commands import main

__all__ = ["main"]
