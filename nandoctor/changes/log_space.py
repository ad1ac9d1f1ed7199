"""Rewrite a logarithm or a quotient in log space."""

from __future__ import annotations

from typing import ClassVar, Literal

from nandoctor.changes.places import place_of
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.changes.stable_logs import LogSpace
from nandoctor.evidence.edits import OpSite, SingleEdit, kind_of_change
from nandoctor.ops import DIVISIONS


@kind_of_change
class StableLog(SingleEdit):
    """Rewrite a logarithm or quotient at a site without its exponential or probability.

    log(softmax) becomes log_softmax, log(sum(exp)) logsumexp, exp / sum(exp) softmax. The engine cannot apply it to a
    run, so it is tried as text.
    """

    why: ClassVar[str] = "The result is computed without the number that rounds to 0 or overflows."
    is_text_alone: ClassVar[bool] = True

    kind: Literal["stable-log"] = "stable-log"
    site: OpSite

    @property
    def title(self) -> str:
        site = self.site
        what = "the quotient" if site.op in DIVISIONS else "the logarithm"
        return f"Compute {what} in {place_of(site) or site.op} in log space"

    def write(self, source: SourceWriter) -> None:
        expression = source.open(self.site)
        space = LogSpace(expression.editor, expression.node, source.ops)
        if self.site.op in DIVISIONS:
            space.write_ratio(expression.node)
        else:
            space.write_logs(expression.node)
