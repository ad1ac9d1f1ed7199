"""Results of the verbs that report on more than one replay, with names and paths as long as they come."""

import factory

from nandoctor.evidence.report import Check, TrialOutcome
from nandoctor.evidence.triage import CodePlace, DumpResult, Group, Triage
from nandoctor.evidence.verification import CodeChange, CodeState, Verification

LONG_MODULE = "backbone.encoder.layers.{}.self_attention.output_projection.norm"
LONG_FILE = "/data/projects/segmentation/models/encoders/attention_blocks.py"


def _group(number):
    return Group(
        verdict="precision",
        grade="exact",
        cause="eps-underflow" if number else None,
        title="A small constant is lost in the lower precision",
        headline="1e-8 rounds to 0 in fp16, so ChannelNorm divides 0 by 0",
        place=CodePlace(
            file=LONG_FILE if number else "", line=45, module=LONG_MODULE.format(number), type="ChannelNorm"
        ),
        paths=tuple(f"runs/{run}/nan-step000012.pth" for run in range(301)),
        modules=(LONG_MODULE.format(number),),
        steps=(12, 9_120),
        runs=tuple(map(str, range(7))),
        representative="runs/0/nan-step000012.pth",
        fix=f"Use an eps of 1e-4 in line 45 of {LONG_FILE}",
    )


def _result(path, outcome, reason=""):
    return DumpResult(path=path, key=path, outcome=outcome, reason=reason)


def triage():
    """Two groups, and files of which some could not be read or replayed."""
    groups = (_group(1), _group(0))
    reason = "the model raised KeyError: 'a key that is not in the batch' when it was called with the batch of the dump"
    return Triage(
        dumps=(
            *(_result(path, "analysed") for path in groups[0].paths),
            *(_result(f"runs/lost/nan-{number}.pth", "unreadable", "the file is cut short") for number in range(4)),
            _result(f"runs/{'deep/' * 20}nan.pth", "failed", reason),
            _result("runs/large/nan.pth", "out-of-memory", reason),
            _result("runs/slow/nan.pth", "timed-out", "no result after 600 s"),
        ),
        groups=groups,
        num_reused=12,
        num_left=3,
        elapsed_s=161.2,
        folder="triage-of-all-runs-of-this-month",
    )


def verification(outcome):
    """A step that was replayed under changed code, with this outcome."""
    failed = factory.fixable() if outcome == "still-fails" else None
    return Verification(
        dump="dumps/nan-step000012.pth",
        outcome=outcome,
        headline="the step that failed passes now" if failed is None else failed.headline,
        failure="the loss was non-finite",
        verdict="healthy" if failed is None else failed.verdict,
        code=CodeState(basis="hash", changes=(CodeChange(file=LONG_FILE, known_by="hash"),)),
        reasons=("The random state of the step is not in the file.", "Nothing has changed since the dump was written."),
        run="train mode, the saved random state",
        under="under fp16 autocast",
        output=TrialOutcome(finite=True, max_rel_err=0.0044),
        checks=(Check(name="gradients", status="passed", text="gradients finite at loss scale 65,536"),),
        first_nonfinite=failed.first_nonfinite if failed else None,
        origin=failed.origin if failed else None,
        cause=failed.cause if failed else None,
        next_steps=(f"nandoctor verify dumps/nan-step000012.pth --changed {LONG_FILE}",),
    )
