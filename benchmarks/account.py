"""Where the time of a replay goes: every run of the step, with what it was for and what it cost.

In: `python benchmarks/account.py [encoder|U-Net]`. Out: a line for each run, in processor time over a plain fp32
forward of the same process, and what was spent outside of runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from overhead import dump_of
from workloads import Workload, make_encoder, make_unet

import nandoctor
from nandoctor.autocast.policy import Policy
from nandoctor.evidence.changes import Snippet, SourcePatch
from nandoctor.evidence.edits import Edit
from nandoctor.replaying.interventions import flatten
from nandoctor.replaying.runner import MODULES_ONLY, Change, FailingStep, Outcome, Watch

REPEATS = 9


@dataclass(slots=True)
class Account:
    """What was run, and the seconds that each run took; runs that a run makes itself count in it."""

    lines: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which every run is noted."""
        run = FailingStep.run

        def noted(
            step: FailingStep, policy: Policy | None = None, watch: Watch = MODULES_ONLY, changes: Sequence[Change] = ()
        ) -> Outcome:
            started = time.process_time()
            try:
                return run(step, policy, watch, changes)
            finally:
                line = _describe(step, policy or step.policy, watch, changes)
                self.lines.append((line, time.process_time() - started))

        FailingStep.run = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            FailingStep.run = run  # type: ignore[method-assign]


def _describe(step: FailingStep, policy: Policy, watch: Watch, changes: Sequence[Change]) -> str:
    what = "forward + backward" if watch.backward else "forward"
    how = "op by op" if watch.ops else "modules" if watch.statistics != "none" else "not traced"
    mode = f"{'train' if step.training else 'eval'}, {step.num_samples} samples"
    return f"{watch.stage:<14} {policy.name}/{policy.format.name:<9} {mode:<17} {what:<18} {how:<10} {_tell(changes)}"


def _tell(changes: Sequence[Change]) -> str:
    texts = [str(change.text) for change in changes if isinstance(change, SourcePatch | Snippet)]
    edits: list[Edit] = [change for change in changes if not isinstance(change, SourcePatch | Snippet)]
    told = [f"text of {len(text.splitlines())} lines" for text in texts]
    return ", ".join([*told, *(_brief(edit) for edit in flatten(edits))])


def _brief(edit: Any) -> str:
    values: Mapping[str, Any] = {name: getattr(edit, name) for name in edit.__slots__}
    shown = (f"{getattr(value, 'name', None) or getattr(value, 'op', None) or value}" for value in values.values())
    return f"{type(edit).__name__}({', '.join(shown)})"


def main() -> None:
    """Print the account of each workload, or of the one that is named."""
    for workload in (make_encoder(), make_unet()):
        if sys.argv[1:] in ([], [workload.name]):
            _print_account(workload)


def _print_account(workload: Workload) -> None:
    sick = workload.build_sick()
    model = workload.build().train()
    with dump_of(workload, sick) as path:
        nandoctor.replay(path, model=lambda: sick, fixes=False)  # fills caches
        account = Account()
        plain = [_time_forward(model, workload) for _ in range(REPEATS)]
        with account.taken():
            started = time.process_time()
            nandoctor.replay(path, model=lambda: sick)
            whole = time.process_time() - started
        plain += [_time_forward(model, workload) for _ in range(REPEATS)]
    unit = statistics.median(plain)
    print(f"\n{workload.name}: {len(account.lines)} runs, in plain fp32 forwards of {1e3 * unit:.0f} ms")
    for line, seconds in account.lines:
        print(f"  {seconds / unit:6.2f}  {line}")
    print(f"  {(whole - sum(seconds for _, seconds in account.lines)) / unit:6.2f}  outside of runs")
    print(f"  {whole / unit:6.2f}  in all")


def _time_forward(model: torch.nn.Module, workload: Workload) -> float:
    started = time.process_time()
    with torch.no_grad():
        model(**workload.batch)
    return time.process_time() - started


if __name__ == "__main__":
    main()
