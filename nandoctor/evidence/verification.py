"""Records of a verification: whether a failed step passes now, and what has changed (`nandoctor.verification/4`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nandoctor.evidence.report import Cause, Check, FirstNonfinite, Fix, Origin, TrialOutcome, Verdict
from nandoctor.text import in_python

VERIFICATION_SCHEMA = "nandoctor.verification/4"
FIX_SCHEMA = "nandoctor.fix/2"

VerificationOutcome = Literal["fixed", "passes", "still-fails", "cannot-tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """A source file that has changed since the dump was written.

    `known_by`: its "hash" in the dump, the "time" it was written, or the "user".
    """

    file: str
    known_by: Literal["hash", "time", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeState:
    """The code of the step compared with that of the training.

    `basis` says how they were compared, "none" if they could not be. `settings` are the replay's settings that differ
    from the training's, in words. `compared` are the files that were compared.
    """

    basis: Literal["hash", "time", "none"] = "none"
    changes: tuple[CodeChange, ...] = ()
    settings: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """True if anything is known to have changed."""
        return bool(self.changes or self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of running a dump's step with the current code.

    `fixed`: it failed and passes now. `passes`: it passes, and the file does not show that it ever failed.
    `still-fails`: it is non-finite, or finite and wrong. `cannot-tell`: for the `reasons` given. `failure` says what in
    the file shows that the step failed, None if nothing does. `verdict` is the replay's, None without one. If the step
    passes, `output` has the error against fp32. `checks` are those that a printed fix has to pass. `notes` say what was
    not checked.
    """

    schema: str = VERIFICATION_SCHEMA
    dump: str
    outcome: VerificationOutcome
    headline: str
    failure: str | None = None
    verdict: Verdict | None = None
    code: CodeState = CodeState()
    reasons: tuple[str, ...] = ()
    run: str | None = None
    under: str | None = None
    output: TrialOutcome | None = None
    checks: tuple[Check, ...] = ()
    first_nonfinite: FirstNonfinite | None = None
    origin: Origin | None = None
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join([f"Verification({self.outcome}: {self.headline})", *map(in_python, self.next_steps)])

    @property
    def exit_code(self) -> int:
        """0 if the step passes, 1 if it still fails, else 125, which tells `git bisect run` to skip the commit."""
        return {"fixed": 0, "passes": 0, "still-fails": 1}.get(self.outcome, 125)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixChoice:
    """One of the verified changes to a failing step: number `pick`, from 1, of `num_verified`.

    `headline` says what failed. `verification` is the step's result with the change written to the files, None if it
    was not written; `written` lists the files that have it now, none if it was undone.
    """

    schema: str = FIX_SCHEMA
    dump: str
    headline: str
    pick: int
    num_verified: int
    fix: Fix
    written: tuple[str, ...] = ()
    verification: Verification | None = None


def cannot_tell(dump: str, reason: str, advice: str = "") -> Verification:
    """Return the verification of a dump that could not be replayed; each line of `reason` is one reason."""
    reasons = tuple(line.strip() for line in reason.splitlines() if line.strip())
    return Verification(
        dump=dump,
        outcome="cannot-tell",
        headline=reasons[0] if reasons else "",
        reasons=reasons,
        next_steps=tuple(line.strip() for line in advice.split("\n") if advice),
    )
