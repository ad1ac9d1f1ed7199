"""Measure what watching, emulating and diagnosing cost in processor time, as ratios to a plain run of the model.

`python benchmarks/overhead.py [--rounds 15] [--only encoder|U-Net|commands]` prints one table; README.md in this folder
keeps one. The dearer variants are timed in a third of the rounds. TorchLens is included if it is installed:
`pip install --no-deps torchlens`, and its dependencies tqdm, graphviz and pillow.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["KINETO_LOG_LEVEL"] = "99"  # torch.profiler would log its start and stop
import torch
from account import PARTS, Account
from torch.profiler import ProfilerActivity, profile
from workloads import CUDA, Workload, dump_of, make_encoder, make_unet

import nandoctor
from nandoctor.autocast.policy import REFERENCE, Policy, apply_policy
from nandoctor.engine.call import Call, Mode
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.formats import FP16
from nandoctor.torch_compat import tree_tensors
from nandoctor.tracing.module_tracer import Tracer

NATIVE = Policy(name="native", format=FP16)
CPU = torch.device("cpu")
SAMPLE = Path(__file__).parent.parent / "sample_dumps" / "log_saturated.pth"
"""The smallest sample that is replayed."""

Variants = Mapping[str, Callable[[], object]]


def main() -> None:
    """Print everything, one line for each ratio."""
    parser = argparse.ArgumentParser(description="Measure what watching, emulating and diagnosing cost.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("encoder", "U-Net", "commands"))
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}")
    for workload in (make_encoder(), make_unet()):
        if asked.only in (None, workload.name):
            _print_workload(workload, asked.rounds)
    if asked.only in (None, "commands"):
        print("\ncommand line")
        _print_commands(max(asked.rounds // 2, 1))


def _print_workload(workload: Workload, rounds: int) -> None:
    print(f"\n{workload.name}: {workload.description}", flush=True)
    model = workload.build().train()
    _print_ratios("plain fp32 forward", _forwards(workload, model), rounds)
    if workload.name == "U-Net":  # the encoder's matrix products are hardly slower in torch's own fp16
        _print_native(workload, model)
    _print_peaks(workload, model)
    _print_diagnoses(workload, max(rounds // 3, 1))


def _forwards(workload: Workload, model: torch.nn.Module) -> Variants:
    """Return the plain forward first, then all that is compared with it; none builds an autograd graph."""
    step = FailingStep(
        model=model,
        call=Call(batch=workload.batch, used=frozenset(workload.batch), forward=lambda batch: model(**batch)),
        mode=Mode(policy=CUDA, device=CPU),
    )

    def plain() -> None:
        with torch.no_grad():
            model(**workload.batch)

    def traced() -> None:
        with torch.no_grad(), Tracer(model) as tracer:
            model(**workload.batch)
        tracer.calls()

    def emulated() -> None:
        with torch.no_grad(), apply_policy(CUDA, CPU):
            model(**workload.batch)

    return {
        "plain": plain,
        "traced forward": traced,
        "a run in fp32": lambda: step.run(REFERENCE),
        "emulated fp16 forward": emulated,
        "a run in emulated fp16": step.run,
        **_peers(workload, model),
    }


def _peers(workload: Workload, model: torch.nn.Module) -> Variants:
    """Return other ways to find a NaN in the forward, each on its own copy of the model, since their hooks stay on."""
    from transformers.debug_utils import DebugUnderflowOverflow

    def forward(watched: torch.nn.Module) -> None:
        with torch.no_grad():
            watched(**workload.batch)

    hooked, debugged, traced = (deepcopy(model) for _ in range(3))
    for module in hooked.modules():
        module.register_forward_hook(_require_finite)
    DebugUnderflowOverflow(debugged)
    peers = {
        "hooks with isfinite": partial(forward, hooked),
        "DebugUnderflowOverflow of transformers": partial(forward, debugged),
    }
    if find_spec("torchlens") is None:
        return peers
    from torchlens.debug import find_nan

    def search() -> None:
        with torch.no_grad():
            assert not find_nan(traced, list(workload.batch.values())).found

    return {**peers, "TorchLens find_nan": search}


def _require_finite(module: torch.nn.Module, _: Any, output: Any) -> None:
    """Raise on a non-finite output: the hook that most people write."""
    for tensor in tree_tensors(output):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{type(module).__name__} returned a non-finite value")


def _print_native(workload: Workload, model: torch.nn.Module) -> None:
    """Compare torch's own CPU fp16 autocast with the emulated one, on a corner of one image: torch's is that slow."""
    corner = {name: tensor[:1, :, :64, :64] for name, tensor in workload.batch.items()}

    def forward(policy: Any) -> Callable[[], None]:
        def under_policy() -> None:
            with torch.no_grad(), apply_policy(policy, CPU):
                model(**corner)

        return under_policy

    _print_ratios("emulated fp16 forward, 1x3x64x64", {"emulated": forward(CUDA), "native fp16": forward(NATIVE)}, 3)


def _print_peaks(workload: Workload, model: torch.nn.Module) -> None:
    """Print the peak memory of the weights and what was allocated beside them, as torch's allocator counts it."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    peaks = {name: weights + _peak_allocation(call) for name, call in _forwards(workload, model).items()}
    plain = peaks.pop("plain")
    print(f"  peak memory over the plain fp32 forward's {plain / 2**20:.0f} MiB")
    for name, peak in peaks.items():
        print(f"    {name:<40} {peak / plain:6.2f}")


def _peak_allocation(call: Callable[[], object]) -> int:
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _print_diagnoses(workload: Workload, rounds: int) -> None:
    """Print the time of the whole replay of a dump, from file to report, relative to the training step itself."""
    model = workload.build().train()

    def forward() -> None:
        with torch.no_grad():
            model(**workload.batch)

    def step() -> None:
        model.zero_grad()
        workload.loss(model(**workload.batch), workload.batch).backward()

    def anomaly() -> None:
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            step()

    sick, accounts = workload.build_sick(), list[Account]()
    with dump_of(workload, sick) as path:
        variants = {
            "plain": forward,
            "a middle layer overflows": partial(_replay, path, sick, "precision", fixes=False),
            "the same, fixes tried": lambda: _account(accounts, path, sick),
        }
        plain = _print_ratios("plain fp32 forward", variants, rounds)
        for part in PARTS:
            of_part = [account.seconds[part] / seconds for account, seconds in zip(accounts[1:], plain, strict=True)]
            print(f"      {part:<38} {statistics.median(of_part):6.2f}")
    with dump_of(workload, model) as path:
        steep = partial(_replay, path, model, "numerics", loss=workload.steep_loss, fixes=False)
        variants = {"plain": step, "torch.autograd.detect_anomaly": anomaly, "only gradients non-finite": steep}
        _print_ratios("plain fp32 forward and backward", variants, rounds)


def _account(accounts: list[Account], path: Path, model: torch.nn.Module) -> None:
    accounts.append(Account())
    with accounts[-1].taken():
        _replay(path, model, "precision")


def _replay(path: Path, model: torch.nn.Module, verdict: str, **options: Any) -> None:
    case = nandoctor.replay(path, model=lambda: model, **options)  # an existing model: building it is not measured
    assert case.verdict == verdict, case


def _print_commands(rounds: int) -> None:
    python = [sys.executable, "-c"]
    main_verb = "import sys; from nandoctor.cli import main; sys.argv[0] = 'nandoctor'; main()"
    workload = make_unet()
    with dump_of(workload, workload.build_sick()) as path:
        commands = {
            "bare": [*python, "pass"],
            "nandoctor --help": [*python, main_verb, "--help"],
            "nandoctor inspect dump.pth": [*python, main_verb, "inspect", str(path)],
            "python -c 'import torch'": [*python, "import torch"],
        }
        replay = [*python, main_verb, "replay", str(SAMPLE)]
        replays = {"import torch": commands["python -c 'import torch'"], "replay the smallest sample": replay}
        replays["the same, --no-fixes"] = [*replay, "--no-fixes"]
        for baseline, timed in (("python -c pass", commands), ("python -c 'import torch'", replays)):
            _print_ratios(baseline, {name: _command(command) for name, command in timed.items()}, rounds)


def _command(arguments: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(arguments, check=True, capture_output=True, cwd=SAMPLE.parent.parent)


def _print_ratios(baseline: str, variants: Variants, rounds: int) -> list[float]:
    """Time the variants in turn, print the median ratio of each to the first, and return the first's seconds."""
    times = _time_in_turn(variants, rounds)
    first, *others = times
    print(
        f"  processor time over the {baseline}'s {1e3 * statistics.median(times[first]):.0f} ms, {rounds} rounds",
        flush=True,
    )
    for name in others:
        # Round by round, so that other load on the machine affects both sides of the ratio.
        ratios = [ours / plain for ours, plain in zip(times[name], times[first], strict=True)]
        print(f"    {name:<40} {statistics.median(ratios):6.2f}")
    return times[first]


def _time_in_turn(variants: Variants, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for attempt in range(rounds + 1):
        for name, call in variants.items():
            started = _processor_time()
            call()
            if attempt:  # the first fills caches
                times[name].append(_processor_time() - started)
    return times


def _processor_time() -> float:
    """Return processor seconds of this process and its children, which exclude other programs on the machine."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
