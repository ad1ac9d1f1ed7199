"""The command line: each verb parses, calls, renders and exits.

In: arguments. Out: text on standard output, notes and progress on standard error, an exit code.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from nandoctor import __version__
from nandoctor.errors import NanDoctorError

if TYPE_CHECKING:
    from nandoctor.case import Case
    from nandoctor.evidence.report import EpsUse, Report
    from nandoctor.evidence.rounding import RoundedConstant
    from nandoctor.replaying.progress import Progress

EXIT_NOT_REPRODUCED = 3
EXIT_CANNOT_TELL = 125  # what `git bisect run` takes for "skip this commit"

DumpPath = click.Path(path_type=Path)

_REPORT_ENDINGS = (".json", ".html", ".md")
_PICTURE_ENDINGS = (".png", ".svg", ".pdf")
_KINDS = ("ranges", "exponents", "divergence", "samples", "origin")
_PER_SAMPLE = frozenset({"exponents", "samples", "origin"})  # these draw what only per-sample statistics hold


class _Verbs(click.Group):
    """A group whose verbs end in one clear message where the user can put things right."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except NanDoctorError as error:
            _fail(error)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="nandoctor")
def main() -> None:
    """The post-mortem for mixed-precision training that died with NaN.

    \b
    nandoctor replay dump.pth --model train.py:make_model
    nandoctor plot dump.pth --model train.py:make_model -o ranges.png
    nandoctor inspect dump.pth
    nandoctor repro dump.pth --model train.py:make_model -o repro.py
    nandoctor eps 1e-8
    """  # noqa: D301  (click wants the escape itself)


def _check_files(*endings: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Refuse a file that cannot be written before the replay, not after."""

    def check(_: click.Context, __: click.Parameter, files: Path | tuple[Path, ...] | None) -> Any:
        for file in files if isinstance(files, tuple) else filter(None, [files]):
            if file.suffix.lower() not in endings:
                raise click.BadParameter(f"{file} ends in none of {', '.join(endings)}.")
            if not file.parent.is_dir():
                raise click.BadParameter(f"there is no folder {file.parent}.")
        return files

    return check


def _replay_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that say how to rebuild and call the model; they mean the same for every verb that replays."""
    options = [
        click.option("--model", metavar="SPEC", help="What builds the model: package.module:attr or file.py:attr."),
        click.option("--model-arg", "model_args", metavar="K=V", multiple=True, help="An argument for the builder."),
        click.option("--config", metavar="SPEC", help="A configuration class, to fill with the dump's values."),
        click.option("--method", metavar="NAME", help="Allow the model's method that the dump holds calls of."),
        click.option("--inputs", metavar="A,B", help="Arrays to call it with: a,b or x=a,mask=b, or '*' for a dict."),
        click.option("--call", metavar="SPEC", help="A function (model, batch) -> output that makes the call."),
        click.option("--loss", metavar="SPEC", help="A function (output, batch) -> scalar: replays the backward too."),
        click.option("--loss-scale", type=float, metavar="S", help="What multiplied the loss (default: the dump's)."),
        click.option("--output", metavar="KEY", help="The saved output to grade the replay against."),
        click.option("--amp-dtype", type=click.Choice(["float16", "bfloat16"]), help="What autocast computed in."),
        click.option("--policy", type=click.Choice(["cuda", "native"]), help="CUDA's op lists (default), or torch's."),
        click.option("--mode", type=click.Choice(["train", "eval"]), help="Default: train, then eval."),
        click.option("--device", metavar="cpu|cuda", help="Where to replay (default cpu)."),
        click.option("--seed", type=int, help="For dropout and the like (default 0, then a few more)."),
        click.option("--no-fixes", is_flag=True, help="Only say what it is: try no cures."),
        click.option("--max-trials", type=click.IntRange(min=0), metavar="N", help="Runs to spend on cures (200)."),
        click.option("--time", type=float, metavar="SECONDS", help="Time to spend on cures (300)."),
        click.option("--no-strict", is_flag=True, help="Load the weights that fit, leave the rest."),
        click.option("--trust", is_flag=True, help="Unpickle whatever the file holds: only if you know who wrote it."),
        click.option(
            "--per-sample", is_flag=True, help="Count samples and exponents in every layer; keep a thumbnail."
        ),
    ]
    for option in reversed(options):
        verb = option(verb)
    return verb


@main.command()
@click.argument("dump", type=DumpPath)
@_replay_options
@click.option(
    "-o",
    "outputs",
    metavar="FILE",
    type=DumpPath,
    multiple=True,
    callback=_check_files(*_REPORT_ENDINGS, *_PICTURE_ENDINGS),
    help="Also write .html (a page), .md (for an issue), .json, .png, .svg or .pdf.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
@click.option("--check", is_flag=True, help="For git bisect run: exit 0 finite, 1 non-finite, 125 could not run.")
@click.option("--quiet", is_flag=True, help="One line.")
def replay(dump: Path, outputs: tuple[Path, ...], as_json: bool, check: bool, quiet: bool, **options: Any) -> None:
    """Replay DUMP under CUDA's autocast and in fp32, and name the first non-finite layer.

    Exit: 0 analysed, 1 an error, 2 wrong usage, 3 the saved NaN did not come back.
    """
    if check:
        sys.exit(_check(dump, options))
    if quiet and not as_json and not outputs:
        options["no_fixes"] = True  # the one line has no room for a cure
    report = _replay(dump, options, quiet=quiet).report
    if as_json:
        from nandoctor.renderers.jsonfile import dumps

        click.echo(dumps(report))
    else:
        _print(report, quiet=quiet)
    for path in outputs:
        _save(report, path)
    sys.exit(EXIT_NOT_REPRODUCED if report.verdict == "not-reproduced" else 0)


@main.command()
@click.argument("source", metavar="DUMP|REPORT.json", type=DumpPath)
@_replay_options
@click.option(
    "-o",
    "file",
    metavar="FILE",
    type=DumpPath,
    callback=_check_files(*_PICTURE_ENDINGS),
    help="Default: the source's name with .KIND.png, in the working directory.",
)
@click.option("--kind", type=click.Choice(_KINDS), default="ranges", show_default=True)
def plot(source: Path, file: Path | None, kind: str, **options: Any) -> None:
    """Draw a dump, which is replayed, or a saved report, which takes neither model nor torch.

    \b
    ranges      what every layer's values span, against what the format can hold
    exponents   how they spread over the exponents
    divergence  how far every layer is from fp32, and which one makes the error
    samples     which samples are bad, or near the limit, in which layer
    origin      where in the tensor the damage was born
    """  # noqa: D301  (click wants the escape itself)
    options["per_sample"] |= kind in _PER_SAMPLE
    report = _read_or_replay(source, options)
    from nandoctor.renderers.plots.figures import save_figure
    from nandoctor.renderers.plots.kinds import draw

    file = file or Path(f"{source.stem}.{kind}.png")
    save_figure(draw(report, kind), file)
    click.echo(f"Wrote {file}", err=True)


@main.command()
@click.argument("before", metavar="A", type=DumpPath)
@click.argument("after", metavar="B", type=DumpPath)
@_replay_options
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON, and nothing else.")
def diff(before: Path, after: Path, as_json: bool, **options: Any) -> None:
    """Tell what changed from A to B: verdict, origin, headroom, ranges.

    Each is a dump, which is replayed, or a saved report: before and after a fix, epoch 3 and epoch 9, fp16 and bf16.
    """
    from nandoctor.diagnosis.compare_reports import compare
    from nandoctor.renderers.diff import comparison_json, print_comparison

    comparison = compare(_read_or_replay(before, options), _read_or_replay(after, options))
    if as_json:
        click.echo(comparison_json(comparison))
    else:
        print_comparison(comparison, _console())


@main.command()
@click.argument("dump", type=DumpPath)
@click.option("--trust", is_flag=True, help="Unpickle whatever the file holds: only if you know who wrote it.")
def inspect(dump: Path, trust: bool) -> None:
    """Tell what is in DUMP, without running any code of it."""
    from nandoctor.dumps.reader import read_dump
    from nandoctor.dumps.summary import summarize
    from nandoctor.renderers.inspect_dump import print_inspection

    print_inspection(summarize(read_dump(dump, trust=trust)), _console())


@main.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Tell what a cause is, why it happens and how it is cured; without CODE, list all causes."""
    from nandoctor.causes.registry import find_page, list_pages
    from nandoctor.renderers.explain import print_catalogue, print_page

    if code is None:
        print_catalogue(list_pages(), _console())
    else:
        print_page(find_page(code), _console())


@main.command()
@click.argument("dump", type=DumpPath)
@_replay_options
@click.option("-o", "file", metavar="FILE", type=DumpPath, help="Write the script there instead of printing it.")
def repro(dump: Path, file: Path | None, **options: Any) -> None:
    """Write a script with the smallest tensors that still fail as DUMP does; it needs torch alone.

    Next to what fails it shows the nearest case that passes. It was run before it is given.
    """
    from nandoctor.case import load
    from nandoctor.case import repro as make_repro

    if file is not None and not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}.", param_hint="-o")
    with _progress_shown(quiet=False) as progress:
        script = make_repro(load(dump, trust=options["trust"]), progress=progress, **_given_settings(options))
    if file is None:
        click.echo(script, nl=False)
        return
    _write(file, script)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NanDoctorError(
            f"{file} cannot be written: {error.strerror or error}.", remedy="Name a file that you may write to."
        ) from error
    click.echo(f"Wrote {file}", err=True)


@main.command()
@click.argument("values", metavar="[VALUE]...", type=float, nargs=-1)
@click.option("--dump", type=DumpPath, help="Replay this dump, and show what every small constant was really used in.")
@_replay_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
def eps(values: tuple[float, ...], dump: Path | None, as_json: bool, **options: Any) -> None:
    """Tell what becomes of a small constant: a VALUE in each format, or every eps of a model.

    \b
    nandoctor eps 1e-8 1e-5
    nandoctor eps --model train.py:make_model
    nandoctor eps --model train.py:make_model --dump dump.pth
    """  # noqa: D301
    if not values and dump is None and options["model"] is None:
        raise click.UsageError("Give a VALUE, --model SPEC or --dump DUMP.")
    from nandoctor.renderers.eps import dumps_eps, print_outlook, print_rounded, print_uses

    rounded_constants = _rounded(values)
    uses = _list_eps(dump, options) if dump is not None or options["model"] is not None else ()
    if as_json:
        click.echo(dumps_eps(rounded_constants, uses))
        return
    print_rounded(rounded_constants, _console())
    if dump is not None:
        print_uses(uses, _console())
    elif options["model"] is not None:
        print_outlook(uses, _console())


def _rounded(values: tuple[float, ...]) -> list[RoundedConstant]:
    from nandoctor.evidence.rounding import SHOWN_FORMATS, round_constant

    for value in values:
        if value == 0 or not math.isfinite(value):
            raise NanDoctorError(f"{value} is no eps.", remedy="Give a finite number other than zero: 1e-8.")
    return [round_constant(value, shown) for value in values for shown in SHOWN_FORMATS]


def _list_eps(dump: Path | None, options: dict[str, Any]) -> tuple[EpsUse, ...]:
    from nandoctor.case import list_eps, load

    given = _given_settings(options)
    with _progress_shown(quiet=False) as progress:
        opened = None if dump is None else load(dump, trust=options["trust"])
        return list_eps(opened, progress=progress, **given)


def _read_or_replay(source: Path, options: dict[str, Any]) -> Report:
    """A saved report by its ending, else the replay of a dump."""
    if source.suffix == ".json":
        from nandoctor.renderers.jsonfile import read_report

        return read_report(source)
    return _replay(source, {**options, "no_fixes": True}).report


def _replay(dump: Path, options: dict[str, Any], *, quiet: bool = False) -> Case:
    from nandoctor.case import load, replay

    given = _given_settings(options)
    with _progress_shown(quiet=quiet) as progress:
        return replay(load(dump, trust=options["trust"]), progress=progress, **given)


def _check(dump: Path, options: dict[str, Any]) -> int:
    """The predicate for `git bisect run`: whatever goes wrong means that this commit cannot be judged."""
    try:
        verdict = _replay(dump, {**options, "no_fixes": True}, quiet=True).verdict
    except click.UsageError:
        raise
    except Exception as error:
        click.echo(f"nandoctor: {getattr(error, 'message', repr(error))}", err=True)
        return EXIT_CANNOT_TELL
    return 0 if verdict in ("healthy", "not-reproduced", "silent") else 1


def _given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave, as `Settings` names them."""
    given = {name: value for name, value in options.items() if value not in (None, ()) and name in _PASSED_ON}
    if "model_args" in given:
        given["model_args"] = dict(_parse_argument(text) for text in given["model_args"])
    if options["no_strict"]:
        given["strict"] = False
    if options["no_fixes"]:
        given["fixes"] = False
    if options["per_sample"]:
        given["per_sample"] = True
    return given


_PASSED_ON = frozenset(
    {
        "model",
        "model_args",
        "config",
        "method",
        "inputs",
        "call",
        "loss",
        "loss_scale",
        "output",
        "amp_dtype",
        "policy",
        "mode",
        "device",
        "seed",
        "max_trials",
        "time",
    }
)


def _parse_argument(text: str) -> tuple[str, Any]:
    """K=V, where V is a Python literal if it reads as one, and a string if not."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not K=V.", param_hint="--model-arg")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _print(report: Report, *, quiet: bool) -> None:
    from nandoctor.renderers.terminal import one_line, print_report

    if quiet:
        click.echo(one_line(report))
    else:
        print_report(report, _console())


def _save(report: Report, path: Path) -> None:
    from nandoctor.renderers.save import save_report

    save_report(report, path)
    click.echo(f"Wrote {path}", err=True)


def _console() -> Any:
    from rich.console import Console

    return Console()


@contextmanager
def _progress_shown(*, quiet: bool) -> Iterator[Progress]:
    """A bar on standard error, gone when the work is done; nothing where standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("module calls"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def _fail(error: NanDoctorError) -> NoReturn:
    click.echo(f"nandoctor: {error.message}", err=True)
    click.echo(error.remedy, err=True)
    sys.exit(error.exit_code)
