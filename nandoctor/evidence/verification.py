"""Whether a step that failed passes now, and what is known of the change that made it: `nandoctor.verification/3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.report import Cause, Check, FirstNonfinite, Fix, Origin, TrialOutcome
from nandoctor.evidence.verdicts import Verdict

VERIFICATION_SCHEMA = "nandoctor.verification/3"
FIX_SCHEMA = "nandoctor.fix/2"

VerificationOutcome = Literal["fixed", "passes", "still-fails", "cannot-tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """A source file that is not as it was when the dump was written.

    `line` is the first line of it that changed, counted from 1 in the file as it is now, and `num_lines` how many did;
    None where the old text is not known. `known_by`: its hash in the dump; the "time" that it was written; or the
    user's word.
    """

    file: str
    known_by: Literal["hash", "time", "user"]
    line: int | None = None
    num_lines: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeState:
    """The code of the step beside that of the training.

    `basis` tells how they were compared, "none" where they could not be. `settings` are those of the replay that are
    not the training's, in words. `compared` are the files that were looked at.
    """

    basis: Literal["hash", "time", "none"] = "none"
    changes: tuple[CodeChange, ...] = ()
    settings: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Tell whether anything is known to have changed."""
        return bool(self.changes or self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the step of a dump does under the code as it is now.

    `fixed`: it failed and passes. `passes`: it passes, and the file does not show that it ever failed. `still-fails`:
    it is non-finite, or finite and wrong. `cannot-tell`: for the `reasons` given. `failure` says what in the file shows
    that the step failed, None for nothing. `verdict` is that of the replay, None where there was none. `output` has
    the error against the reference where the step passes: the step in fp32 with the "unchanged" code, or, where that
    is not known, with the "changed" one. `checks` are those that a printed fix has to pass. `notes` say
    what was not checked.
    """

    schema: str = VERIFICATION_SCHEMA
    dump: str
    outcome: VerificationOutcome
    headline: str
    failure: str | None
    verdict: Verdict | None
    code: CodeState
    reasons: tuple[str, ...] = ()
    run: str | None = None
    under: str | None = None
    output: TrialOutcome | None = None
    reference: Literal["unchanged", "changed"] | None = None
    checks: tuple[Check, ...] = ()
    first_nonfinite: FirstNonfinite | None = None
    origin: Origin | None = None
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Verification({self.outcome}: {self.headline})"

    @property
    def exit_code(self) -> int:
        """0 where the step passes, 1 where it still fails, and what `git bisect run` takes for "skip this commit"."""
        return {"fixed": 0, "passes": 0, "still-fails": 1}.get(self.outcome, 125)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixChoice:
    """One of the changes that were verified on a failing step: number `pick`, from 1, of `num_verified`.

    `headline` says what failed. `verification` tells how the step fared with the change written to the files, None
    where it was not written; `written` lists the files that have it now, none where it was undone.
    """

    schema: str = FIX_SCHEMA
    dump: str
    headline: str
    pick: int
    num_verified: int
    fix: Fix
    written: tuple[str, ...] = ()
    verification: Verification | None = None


def cannot_tell(dump: str, reason: str, next_steps: tuple[str, ...] = ()) -> Verification:
    """The verification of a dump that could not be replayed; each line of `reason` is one."""
    reasons = tuple(line.strip() for line in reason.splitlines() if line.strip())
    return Verification(
        dump=dump,
        outcome="cannot-tell",
        headline=reasons[0] if reasons else "",
        failure=None,
        verdict=None,
        code=CodeState(),
        reasons=reasons,
        next_steps=tuple(step.strip() for step in next_steps),
    )
