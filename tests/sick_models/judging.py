"""The examination of nandoctor: a case is saved as a training script would, and replayed from the file.

In: a case. Out: `diagnose` gives the report, `faults` what is wrong with it.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

import nandoctor
from nandoctor.evidence.report import Report
from sick_models.case import Case
from sick_models.probing import run


def diagnose(case: Case, folder: Path, *, fixes: bool = False) -> Report:
    """The report on the case's failing step, by way of a dump file in `folder`; fixes only where they are asked for.

    The file holds the last good weights; where the case has an optimizer, also what the step left in it.
    """
    path, model = folder / "dump.pth", case.build()  # what spoils it is no code of the model's
    dump = {"state_dict": model.state_dict(), **case.batch()}
    if case.optimizer is not None:
        dump["optimizer"] = run(case, autocast=True).optimizer
    torch.save(dump, path)
    return nandoctor.replay(
        path,
        model=model,
        call=case.call,
        loss=case.loss,
        loss_scale=case.loss_scale,
        mode="train" if case.train else "eval",
        fixes=fixes,
        time=math.inf,  # what is found depends on the number of runs alone, and not on how busy the machine is
    ).report


def faults(case: Case, report: Report) -> list[str]:
    """What the report says and the case does not, in words; nothing where it is right in every point."""
    return list(_faults(case, report))


def _faults(case: Case, report: Report) -> Iterator[str]:
    origin, code = report.origin, report.cause.code if report.cause else None
    claims = [("verdict", report.verdict, case.verdict)]
    if origin is not None and case.verdict != "healthy":
        claims += [
            ("phase", origin.phase, case.phase),
            ("module", origin.place.module, case.module),
            ("op", origin.op or "", case.op),
        ]
    yield from (f"{what} {said!r}, not {true!r}" for what, said, true in claims if said != true)
    if (origin is None) != (case.verdict == "healthy"):
        yield f"{'no' if origin is None else 'an'} origin"
    if case.verdict != "healthy" and code not in case.causes:
        yield f"cause {code!r}, not {' or '.join(map(repr, case.causes))}"
    if report.cause is not None and not report.headline == report.cause.headline != "":
        yield f"headline {report.headline!r}, not the cause's own {report.cause.headline!r}"
    if origin is not None and not _names_line(case, origin.source.text if origin.source else None):
        yield f"line {origin.source.text if origin.source else None!r}, not {case.line!r}"


def _names_line(case: Case, text: str | None) -> bool:
    return not case.line if text is None else case.line in text
