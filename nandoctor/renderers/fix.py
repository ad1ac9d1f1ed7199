"""What `nandoctor fix` prints: one verified change as a diff or as code, where it goes, and what was checked."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from nandoctor.evidence.report import Fix, FixSettings, Report
from nandoctor.evidence.verification import FixChoice
from nandoctor.renderers.commands import fix_command
from nandoctor.renderers.console import CodeLine, diff_style, fact_rows, literal, print_parts
from nandoctor.renderers.facts import Fact
from nandoctor.renderers.fix_facts import WHERE_TO_RUN, describe_outcome, every_check, git_flags, write_flags
from nandoctor.renderers.fix_reasons import reason_facts
from nandoctor.text import constant, printable

_MAX_OTHERS = 3


def print_fix(choice: FixChoice, report: Report, console: Console) -> None:
    """Print the chosen one of the report's changes, and the next best ones in a line each."""
    print_parts(_parts(choice, report), console, crop=False)


def _parts(choice: FixChoice, report: Report) -> Iterator[RenderableType]:
    chosen = choice.fix
    yield literal(choice.headline, "bold")
    yield Text()
    yield literal(f"Fix {choice.pick} of {choice.num_verified}, verified: {chosen.title}", "bold")
    is_diff = chosen.kind == "source"
    yield from (CodeLine(line, diff_style(line) if is_diff else "") for line in code_of(chosen).splitlines())
    yield Text()
    yield from fact_rows(list(_facts(choice, report)))


def code_of(fix: Fix) -> str:
    """The change as a diff or as code: what a setting sets is written out too."""
    return fix.patch or "\n".join(_settings_as_code(fix.settings or FixSettings()))


def _settings_as_code(settings: FixSettings) -> Iterator[str]:
    if settings.amp_dtype is not None:
        yield f'with torch.autocast("cuda", dtype=torch.{settings.amp_dtype}):'
    if settings.loss_scale is not None:
        yield f'scaler = torch.amp.GradScaler("cuda", init_scale={constant(settings.loss_scale)})'
    if settings.optimizer_eps is not None:
        yield "for group in optimizer.param_groups:"
        yield f'    group["eps"] = {constant(settings.optimizer_eps)}'


def _facts(choice: FixChoice, report: Report) -> Iterator[Fact]:
    chosen = choice.fix
    yield Fact(label="result", text=describe_outcome(chosen.outcome))
    yield from every_check(chosen)
    yield from reason_facts(chosen)
    if chosen.kind != "source":
        yield Fact(label="where", text=WHERE_TO_RUN[chosen.kind])
    elif choice.verification is None:
        pick = () if choice.pick == 1 else (f"--pick {choice.pick}",)
        for label, flags in (("apply it", write_flags(chosen)), ("or", git_flags(chosen))):
            if command := fix_command(report, *pick, *flags):
                yield Fact(label=label, text=command, is_command=True)
    verified = (item for item in report.fixes if item.verified)
    for place, other in list(enumerate(verified, 1))[:_MAX_OTHERS]:
        if other is not chosen:
            yield Fact(label=f"--pick {place}", text=f"{printable(other.title)}: {describe_outcome(other.outcome)}")
