"""A triage as one HTML page that links to the reports of its folder.

Whatever a dump named is escaped.
"""

from __future__ import annotations

from nandoctor.evidence.triage import Triage
from nandoctor.renderers.templating import render
from nandoctor.renderers.triage import (
    describe_place,
    describe_samples,
    describe_steps,
    describe_triage,
    fold_reasons,
    name_sample,
)
from nandoctor.renderers.verdicts import VERDICTS


def triage_page(triage: Triage) -> str:
    """The whole page as text."""
    return render(
        "triage.html.j2",
        triage=triage,
        headline=describe_triage(triage),
        results={result.path: result for result in triage.dumps},
        missing=fold_reasons(triage.dumps),
        verdicts=VERDICTS,
        place_of=describe_place,
        samples_of=describe_samples,
        steps_of=describe_steps,
        name_of=name_sample,
    )
