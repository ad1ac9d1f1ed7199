"""Account for the time of a replay: every run of the step with its purpose and cost, and the sums by part.

`python benchmarks/account.py [encoder|U-Net]` prints a line for each run, in processor time relative to a plain fp32
forward in the same process, and a line for each part of the replay, with the time that it spent outside of runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from workloads import Workload, dump_of, make_encoder, make_unet

import nandoctor
from nandoctor import pipeline
from nandoctor.autocast.policy import EXACT, REFERENCE, Policy
from nandoctor.engine import runner
from nandoctor.engine.runner import MODULES_ONLY, FailingStep, Outcome, Watch
from nandoctor.evidence.edits import Change, Snippet, SourcePatch, flatten
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.search import _Search

REPEATS = 9
PARTS = {
    "diagnosis": "from the file to the cause",
    "search": "probes, and texts whose output fails",
    "reference": "the unchanged step in fp32 with its gradients, and other runs in fp32",
    "verification": "texts whose output passes: gradients, healthy samples, other batches",
    "settings": "what the failure depends on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the step, including the runs nested in it."""

    part: str
    line: str
    seconds: float


@dataclass(slots=True)
class Account:
    """The runs of one replay, and the processor time of each part, including what it does outside of runs."""

    runs: list[Run] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    num_verified: int = 0
    num_texts: int = 0
    _backward: float = 0.0
    _part: str = "diagnosis"
    _since: float = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Record one replay in this context."""
        self._since = time.process_time()
        patches = (
            mock.patch.object(FailingStep, "run", _replacing(FailingStep.run, self._run)),
            mock.patch.object(Verifier, "_verify", _replacing(Verifier._verify, self._verify)),
            mock.patch.object(_Search, "vary_settings", _replacing(_Search.vary_settings, self._vary)),
            mock.patch.object(pipeline, "search_fixes", partial(self._search, pipeline.search_fixes)),
            mock.patch.object(runner, "run_backward", partial(self._run_backward, runner.run_backward)),
        )
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
        self._turn("diagnosis")

    def _turn(self, part: str) -> str:
        """Switch to a part; book the time since the last switch to the part before, and return that part."""
        now, before = time.process_time(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    @contextmanager
    def _at(self, part: str) -> Iterator[None]:
        before = self._turn(part)
        try:
            yield
        finally:
            self._turn(before)

    def _search(self, search: Callable[..., Any], *args: Any) -> Any:
        with self._at("search"):
            return search(*args)

    def _run_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time the backward pass of a run by itself; its part is that of the run."""
        started = time.process_time()
        gradients = run(*args, **kwargs)
        self._backward = time.process_time() - started
        return gradients

    def _vary(self, vary: Callable[..., Any], search: _Search) -> None:
        with self._at("settings"):
            vary(search)

    def _verify(self, verify: Callable[..., Any], verifier: Verifier, *args: Any) -> Any:
        """Book the verification of a text; if its output fails, it was a probe, and its time belongs to the search."""
        first, spent = len(self.runs), self.seconds["verification"]
        with self._at("verification"):
            proof, checks = verify(verifier, *args)
        self.num_texts += 1
        self.num_verified += proof.passes
        if checks[0].status == "failed":
            self.seconds["search"] += self.seconds["verification"] - spent
            self.seconds["verification"] = spent
            parts = {"verification": "search"}
            self.runs[first:] = (replace(run, part=parts.get(run.part, run.part)) for run in self.runs[first:])
        return proof, checks

    def _run(
        self,
        run: Callable[..., Outcome],
        step: FailingStep,
        policy: Policy | None = None,
        watch: Watch = MODULES_ONLY,
        changes: Sequence[Change] = (),
    ) -> Outcome:
        is_reference = self._part in ("search", "verification") and policy in (REFERENCE, EXACT)
        started = time.process_time()
        with self._at("reference" if is_reference else self._part):
            part = self._part
            try:
                return run(step, policy, watch, changes)
            finally:
                line = _describe(step, policy or step.mode.policy, watch, changes)
                seconds = time.process_time() - started - self._backward
                self.runs.append(Run(part=part, line=line, seconds=seconds))
                if self._backward:
                    self.runs.append(Run(part=part, line="  its backward pass", seconds=self._backward))
                self._backward = 0.0


def _replacing(method: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `instead` with the original method as the first argument."""
    return lambda *args, **options: instead(method, *args, **options)


def _describe(step: FailingStep, policy: Policy, watch: Watch, changes: Sequence[Change]) -> str:
    what = "forward + backward" if watch.backward else "forward"
    how = "op by op" if watch.ops else "modules" if watch.statistics != "none" else "not traced"
    mode = f"{'train' if step.mode.training else 'eval'}, {step.call.batch_size} samples"
    return f"{watch.stage:<14} {policy.name}/{policy.format.name:<9} {mode:<17} {what:<18} {how:<10} {_tell(changes)}"


def _tell(changes: Sequence[Change]) -> str:
    texts = [change.text for change in changes if isinstance(change, Snippet)]
    texts += [change.diff() for change in changes if isinstance(change, SourcePatch)]
    told = [f"text of {len(text.splitlines())} lines" for text in texts]
    return ", ".join([*told, *(_brief(edit) for edit in flatten(changes))])


def _brief(edit: Any) -> str:
    values: Mapping[str, Any] = {name: getattr(edit, name) for name in edit.__slots__}
    shown = (f"{getattr(value, 'name', None) or getattr(value, 'op', None) or value}" for value in values.values())
    return f"{type(edit).__name__}({', '.join(shown)})"


def main() -> None:
    """Print the account of each workload, or of the named one."""
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
            nandoctor.replay(path, model=lambda: sick)
        plain += [_time_forward(model, workload) for _ in range(REPEATS)]
    unit = statistics.median(plain)
    print(f"\n{workload.name}: {len(account.runs)} runs, in plain fp32 forwards of {1e3 * unit:.0f} ms")
    for run in account.runs:
        print(f"  {run.seconds / unit:6.2f}  {run.part:<13} {run.line}")
    print(f"  {account.num_texts} texts were run, {account.num_verified} of them verified")
    for part, what in PARTS.items():
        runs_s = sum(run.seconds for run in account.runs if run.part == part)
        seconds = account.seconds[part]
        print(f"  {seconds / unit:6.2f}  {part}: {what} ({(seconds - runs_s) / unit:.2f} outside of runs)")
    print(f"  {account.seconds.total() / unit:6.2f}  in all")


def _time_forward(model: torch.nn.Module, workload: Workload) -> float:
    started = time.process_time()
    with torch.no_grad():
        model(**workload.batch)
    return time.process_time() - started


if __name__ == "__main__":
    main()
