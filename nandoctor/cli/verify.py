"""The verbs for changes of the code: `fix` shows or makes one, `verify` checks whether the step passes now.

A fix is written to all of its files or to none, so that it can be taken back if it does not help.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import click

from nandoctor.cli.failures import exit_code_answers, remedy_for, tell
from nandoctor.cli.shared import MODEL_AND_STEP, DumpPath, GroupedCommand, call, json_option, settings_options, show
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import from_plain, to_json
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.report import Fix, Report
from nandoctor.evidence.verification import FixChoice, Verification, cannot_tell
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source
from nandoctor.text import plural
from nandoctor.views.blocks import Block
from nandoctor.views.fixes import WHERE_TO_RUN, code_of_fix, command_for, no_fix_heading
from nandoctor.views.save import write_bytes
from nandoctor.views.verification import fix_document, verification_document

EXIT_NOTHING_FAILED = 3


@click.command(cls=GroupedCommand, epilog="\b\nnandoctor verify nan.pth --model train.py:make_model")
@click.argument("dump", type=DumpPath)
@json_option
@click.option(
    "--changed", metavar="FILE", type=DumpPath, multiple=True, help="A file that was changed, if the dump cannot tell."
)
@click.option("--written-fix", "proved", is_flag=True, hidden=True, help="The change was proved in this replay.")
@settings_options(*MODEL_AND_STEP)
def verify(dump: Path, as_json: bool, **options: Any) -> None:
    """Check whether the failing step of DUMP passes under the code as it is now.

    Exit: 0 fixed, or it passes and nothing shows that it failed; 1 still fails; 125 cannot tell.
    """
    with exit_code_answers():
        try:
            verification: Verification = call("check", dump, options)[0]
        except NanDoctorError as error:
            verification = cannot_tell(str(dump), error.message, remedy_for(error))
        except Exception as error:
            verification = cannot_tell(str(dump), f"nandoctor failed: {error!r}")
        _print(verification, verification_document(verification), as_json=as_json)
    sys.exit(verification.exit_code)


@click.command(
    cls=GroupedCommand,
    epilog="\b\n"
    "nandoctor fix nan.pth --model train.py:make_model\n"
    "nandoctor fix nan.pth --model train.py:make_model --write\n"
    "nandoctor fix nan.pth --model train.py:make_model --diff | git apply\n",
)
@click.argument("dump", type=DumpPath)
@click.option(
    "--pick", type=click.IntRange(min=1), metavar="N", help="Which of the verified fixes (default: 1), or workarounds."
)
@click.option("--diff", "only_diff", is_flag=True, help="Print the diff alone, for git apply.")
@click.option("--write", is_flag=True, help="Make the change, and verify it from the disk; undo it if that fails.")
@click.option("--allow-installed", is_flag=True, help="With --write: also to a package in site-packages.")
@json_option
@settings_options(*MODEL_AND_STEP, "fixes", without="fixes")
def fix(dump: Path, pick: int | None, only_diff: bool, write: bool, as_json: bool, **options: Any) -> None:
    """Print the smallest change that was verified on the failing step of DUMP, as a diff; or make it.

    Exit: 0 printed, or written and verified; 1 an error, or undone; 3 nothing fails.
    """
    if only_diff and (write or as_json):
        raise click.UsageError("--diff goes with neither --write nor --json.")
    allow_installed = options.pop("allow_installed")
    case = call("replay", dump, {**options, "fixes": True})
    if case.finite:
        tell(f"nandoctor: nothing to fix: {case.report.headline}")
        sys.exit(EXIT_NOTHING_FAILED)
    choice = _choose(case.report, pick)
    if only_diff:
        patch = _patch_of(choice.fix)
        click.echo(patch.diff().encode(), nl=False)
        if Path(patch.root).resolve() != Path.cwd():
            tell(f"Its paths start from {patch.root}: git -C {shlex.quote(patch.root)} apply")
        return
    if write:
        choice = _write(choice, case.report, allow_installed=allow_installed)
    try:
        _print(choice, fix_document(choice, case.report), as_json=as_json)
    finally:
        if write:
            tell(f"Written: {', '.join(choice.written)}" if choice.written else "The change was undone.")
    sys.exit(0 if choice.verification is None or choice.verification.exit_code == 0 else 1)


def _print(found: Any, document: Iterable[Block], *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(found))
    else:
        show(document)


def _choose(report: Report, pick: int | None) -> FixChoice:
    """Return the fix of that number, from 1: of those that were verified, then of the workarounds if one is named."""
    verified = [item for item in report.fixes if item.verified]
    workarounds = [] if pick is None else [item for item in report.fixes if item.workaround is not None]
    choices, pick = [*verified, *workarounds], pick or 1
    if not choices:
        found = ". ".join(filter(None, [no_fix_heading(report), f"{report.headline.removesuffix('.')}."]))
        page = command_for("replay", report, "-o report.html")
        raise NanDoctorError(
            "\n".join([found, *report.search_notes]),
            remedy="\n".join(report.next_steps) or f"Every layer, on one page: {page}",
        )
    if pick > len(choices):
        raise click.UsageError(f"--pick {pick}: {plural(len(verified), 'fix was', 'fixes were')} verified.")
    return FixChoice(
        dump=report.dump.path, headline=report.headline, pick=pick, num_verified=len(verified), fix=choices[pick - 1]
    )


def _patch_of(chosen: Fix) -> SourcePatch:
    if chosen.kind != "source":
        what = f"This fix is no diff of a file ({chosen.title}): {WHERE_TO_RUN[chosen.kind]}."
        raise NanDoctorError(
            "\n".join([what, *code_of_fix(chosen).lines]),
            remedy="Without --diff and --write, nandoctor fix lists other fixes, if there are any.",
        )
    return SourcePatch(root=chosen.patch_root or ".", files=chosen.files)


def _write(choice: FixChoice, report: Report, *, allow_installed: bool) -> FixChoice:
    """Write the files, and replay the step in a new process; restore the files unless the step passes."""
    with ExitStack() as undo:
        names = write_patch(_patch_of(choice.fix).files, undo, allow_installed=allow_installed)
        verification = _verify_afresh(report, names)
        if verification.exit_code == 0:
            undo.pop_all()
            choice = replace(choice, written=names)
    return replace(choice, verification=verification)


def _verify_afresh(report: Report, changed: Sequence[str]) -> Verification:
    """Run `nandoctor verify` in a new process, which imports the changed files from the disk.

    The step is replayed as it failed here: in the same mode, with the same seed, without autocast if it was so.
    """
    path, *flags = report.arguments
    if report.runs is not None:
        flags += ["--mode", "train" if report.runs.autocast.training else "eval"]
        flags += ["--amp-dtype", "none"] if report.runs.autocast.policy == "none" else []
        flags += [] if report.runs.autocast.seed is None else ["--seed", str(report.runs.autocast.seed)]
    flags += [text for name in changed for text in ("--changed", name)]
    # `-m` puts the working directory on the import path, where a stranger's random.py may lie beside the dump.
    safely = [] if sys.path[:1] in ([""], [str(Path.cwd())]) else ["-P"]
    command = [sys.executable, *safely, "-m", "nandoctor", "verify", "--json", "--written-fix", *flags, "--", path]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        return from_plain(Verification, json.loads(done.stdout))
    except ValueError:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return cannot_tell(path, f"The changed code could not be replayed: {last[0]}")


def write_patch(files: Sequence[ChangedFile], undo: ExitStack, *, allow_installed: bool = False) -> tuple[str, ...]:
    """Write all files, once each was read and found as it was, and return their paths; `undo` restores them.

    A file that was changed in the meantime is then left alone.

    Raises:
        NanDoctorError: a file is missing, has changed since or is not text, or it belongs to an installed package and
            `allow_installed` is not set; or it cannot be written.
    """
    planned = []
    for file in files:
        path = Path(file.path).resolve()
        if not allow_installed and not PACKAGE_FOLDERS.isdisjoint(path.parts):
            raise NanDoctorError(
                f"{path} belongs to an installed package.",
                remedy="Take a fix of your own code with --pick N, send the patch to the package's authors, or add "
                "--allow-installed.",
            )
        try:
            before = path.read_bytes()
            text, encoding = decode_source(before)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise NanDoctorError(f"{path} cannot be read: {reason}.", remedy="Apply the patch by hand.") from error
        if text != file.before:
            raise NanDoctorError(
                f"{path} is not as it was when the fix was found.",
                remedy="Run nandoctor fix again: it reads the file anew.",
            )
        planned.append((path, before, file.after.encode(encoding)))
    for path, before, after in planned:
        undo.callback(_restore, path, before, after)
        _write_source(after, path)
    return tuple(str(path) for path, *_ in planned)


def _restore(path: Path, before: bytes, after: bytes) -> None:
    if path.is_file() and path.read_bytes() == after:
        _write_source(before, path)


def _write_source(source: bytes, path: Path) -> None:
    """Write the file and delete its bytecode, which Python accepts for any source of the same size and second."""
    write_bytes(source, path)
    with suppress(OSError, NotImplementedError):
        Path(cache_from_source(path)).unlink()
