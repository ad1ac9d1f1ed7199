"""Run a step with a printed fix in its own process, under `nandoctor.cuda_autocast` only: no tracer, no search.

Reads jobs from standard input, one line of JSON each, and prints the path of each answer, a JSON file. Every job runs
in a fork of a process that has imported torch and the autocast, and nothing of the step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nandoctor.autocast.policy import cuda_autocast

Batch = dict[str, torch.Tensor]
BATCHES = ("as it failed", "in another order", "noisy", "halved", "doubled", "other seed")
SMALLER = "a quarter of inputs and targets"
"""Where float64 overflows, or rounds to a singular point, these show what the formula means."""
SUM = "sum"
"""Its gradient through a norm or a softmax is zero apart from noise, so it only has to be finite."""
FIRST_SCALE = 65536.0
"""The initial scale of torch.amp.GradScaler, which halves it until the gradients are finite."""


def main() -> None:
    """Fork for each job, so that it starts without the modules of the previous one."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _work(job)
            os._exit(0)
        os.waitpid(child, 0)
        print(job["answer"], flush=True)


def _work(job: dict[str, Any]) -> None:
    try:
        torch.set_num_threads(1)
        sys.path[:0] = [str(Path(job["folder"], name)) for name in ("site-packages", "tests", "benchmarks")]
        sys.path += job["packages"]
        answer = _judge(job)
    except Exception:
        answer = {"raised": traceback.format_exc(limit=-3)}
    Path(job["answer"]).write_text(json.dumps(answer))


def _judge(job: dict[str, Any]) -> dict[str, Any]:
    """Run the step on each batch; if the job has no fix, save its outputs and gradients as the reference."""
    from fix_cases import case_named

    case = case_named(job["case"])
    if job["kind"] == "reference":
        runs = {name: _run_unless_it_raises(case, name, job) for name in BATCHES}
        plain = {name: _run_unless_it_raises(case, name, job, autocast=True) for name in BATCHES}
        exact = {name: _run_exact(case, name, job) for name in (*BATCHES, SMALLER)}
        beside = [_run_exact(_moved(case, seed, size), BATCHES[0], job) for size in _STEPS for seed in range(_SIDES)]
        torch.save({"fp32": runs, "autocast": plain, "fp64": exact, "beside": beside}, job["reference"])
        return {}
    reference = torch.load(job["reference"], weights_only=False)
    runs = [name for name in BATCHES[1:] if reference["fp32"][name]]  # a package may refuse other batches
    names = (BATCHES[0], *runs)
    return {"batches": {name: _compare(_run(case, name, job, autocast=True), reference, name, job) for name in names}}


def _run_exact(case: Any, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run the step in float64; {} if the model does not run in it. Gradients in fp32 may be noise."""
    wide = replace(case, build=lambda: _in_fp32(case.build).double(), batch=lambda: _widened(_in_fp32(case.batch)))
    torch.set_default_dtype(torch.float64)
    try:
        return _run_unless_it_raises(wide, name, {**job, "settings": {"loss_scale": 1.0}})
    finally:
        torch.set_default_dtype(torch.float32)


def _run_unless_it_raises(case: Any, name: str, job: dict[str, Any], *, autocast: bool = False) -> dict[str, Any]:
    """Run the unchanged step; {} if it raises, as where a NaN is an index, or fp16 cannot hold a mask's constant."""
    try:
        return _run(case, name, job, autocast=autocast)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return {}


_SIDES, _STEPS = 4, (1e-4, 1e-6)
"""How many neighbours show what the formula means at a point where float64 has no number, at each distance from it."""


def _moved(case: Any, seed: int, size: float) -> Any:
    """Return the case in float64 with all weights, and all arrays of measurements, moved a little at random.

    Whole numbers count or name things, such as the kinds of bonds: between them the code means something else.
    """

    def build() -> Any:
        model = case.build().double()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(_shift(weight, seed, size))
        return model

    def batch() -> Batch:
        wide = _widened(case.batch())
        moved = {name for name, value in wide.items() if value.is_floating_point() and bool((value % 1).any())}
        return {name: value + _shift(value, seed, size) if name in moved else value for name, value in wide.items()}

    return replace(case, build=build, batch=batch)


def _shift(value: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return size * noise * torch.where(value == 0, 1.0, value)


def _in_fp32(make: Callable[[], Any]) -> Any:
    """Call `make` with fp32 as the default dtype: float64 would draw other random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _widened(batch: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


class _Reading(dict[str, torch.Tensor]):
    """A batch that records which of its arrays were read: the inputs, but not the targets."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def keys(self) -> Any:
        self.read.update(super().keys())
        return super().keys()


def _run(case: Any, name: str, job: dict[str, Any], *, autocast: bool = False) -> dict[str, Any]:
    """Return the outputs, and each loss with its gradients at the largest scale at which all are finite.

    That is the known scale, else the one that GradScaler reaches from 65,536. Gradients above 65,504 take it below 1,
    so the search ends where fp16 has no digits left.
    """
    settings = job.get("settings") or {}
    known = settings.get("loss_scale") or (case.loss_scale if case.loss else None)
    made: dict[str, Any] = {"losses": {}, "gradients": {}}
    for loss_name, compute in _losses(case):
        for scale in [known] if known else [FIRST_SCALE / 4**k for k in range(20)]:
            values, loss, gradients = _step(case, name, job, compute, scale, autocast=autocast)
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            if finite or not math.isfinite(loss):
                break
        made["values"] = values
        made["losses"][loss_name] = loss
        made["gradients"][loss_name] = {"scale": scale if finite else None, "values": gradients}
    return made


def _step(
    case: Any, name: str, job: dict[str, Any], compute: Callable[..., torch.Tensor], scale: float, *, autocast: bool
) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Run forward, loss and backward as in a training step; return outputs, loss, and gradients at scale 1."""
    settings = (job.get("settings") or {}) if autocast else None
    seed = 1 if name == "other seed" else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = case.build().train(case.train)
        batch = _varied(case, name)
        if job["kind"] in ("snippet", "state"):
            exec(job["patch"], {"torch": torch, "model": model})
        torch.manual_seed(seed)
        with _precision(settings):
            output = case.call(model, batch)
            loss = _in_or_out_of_autocast(compute, output, batch)
        values = [leaf.detach().float().clone() for leaf in _tensors(output)]
        if loss.requires_grad:
            with _precision(settings), torch.autocast("cpu", enabled=False):
                (loss * scale).backward()
    named = [(path, item.grad) for path, item in model.named_parameters() if item.grad is not None]
    return values, float(loss.detach()), {path: gradient.float() / scale for path, gradient in named}


@contextmanager
def _precision(settings: Mapping[str, Any] | None) -> Iterator[None]:
    if settings is None:
        yield
        return
    with cuda_autocast(getattr(torch, settings.get("amp_dtype") or "float16")):
        yield


def _in_or_out_of_autocast(compute: Callable[..., torch.Tensor], output: Any, batch: Batch) -> torch.Tensor:
    """Return the loss, computed outside of autocast if it uses an op that CUDA's autocast rejects."""
    try:
        return compute(output, batch)
    except RuntimeError as error:
        if "unsafe to autocast" not in str(error):
            raise
    with torch.autocast("cpu", enabled=False):
        return compute(output, batch)


def _losses(case: Any) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """Return the training's loss if it is known, else two common losses."""
    if case.loss is not None:
        return [("its loss", case.loss)]
    return [
        ("regression", lambda output, _: sum(_distance_from_targets(leaf) for leaf in _tensors(output))),
        (SUM, lambda output, _: sum(leaf.float().sum() for leaf in _tensors(output))),
    ]


def _distance_from_targets(leaf: torch.Tensor) -> torch.Tensor:
    """Return the mean square difference from a fixed pattern: the mean square of a norm's output would be constant."""
    wide = leaf if leaf.dtype is torch.float64 else leaf.float()
    return (wide - torch.linspace(-1, 1, leaf.numel()).to(wide).cos().view(leaf.shape)).square().mean()


def _varied(case: Any, name: str) -> Batch:
    batch = _Reading(case.batch())
    if name in ("as it failed", "other seed"):
        return dict(batch)
    if name == "in another order":
        return {key: value.roll(1, 0) if value.dim() else value for key, value in batch.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        case.call(case.build().train(case.train), batch)
    generator = torch.Generator().manual_seed(0)

    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        flags = bool(((value == 0) | (value == 1)).all())
        is_moved = key in batch.read or name == SMALLER
        if not is_moved or not value.is_floating_point() or (flags and name != "noisy"):
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        factor = {"halved": 0.5, "doubled": 2.0, SMALLER: 0.25}.get(name)
        return value * factor if factor else value * (1 + 1e-3 * noise)

    return {key: change(key, value) for key, value in dict(batch).items()}


def _tensors(tree: Any) -> list[torch.Tensor]:
    from sick_models.probing import float_tensors

    return float_tensors(tree)


def _compare(run: dict[str, Any], reference: dict[str, Any], name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return what is finite, how far outputs and gradients are from the unchanged step in fp32, and the harm done.

    A healthy sample is harmed if it is more than 1 % from fp32, and from what it was under autocast.
    """
    exact = reference["fp32"][name] or reference["fp64"][name] or run
    plain = reference["autocast"][name] or exact
    pairs = list(zip(run["values"], exact["values"], plain["values"], strict=True))
    finite = all(bool(ours[theirs.isfinite()].isfinite().all()) for ours, theirs, _ in pairs)
    coarser = 8 if (job.get("settings") or {}).get("amp_dtype") else 1  # bf16 has 8 significant bits, fp16 has 11
    harmed = max((_harm(*pair, job["guilty"], coarser) for pair in pairs), default=0.0) if job["guilty"] else 0.0
    gradients = {
        loss: {
            "scale": made["scale"],
            "error": None
            if loss == SUM
            else _nearest(
                made["values"],
                exact["gradients"][loss]["values"],
                reference["fp64"][name].get("gradients", {}).get(loss, {}).get("values"),
            ),
        }
        for loss, made in run["gradients"].items()
    }
    return {
        "finite": finite,
        "loss": all(map(math.isfinite, run["losses"].values())),
        "error": max((_error(ours, theirs) for ours, theirs, _ in pairs), default=0.0),
        "harm": harmed,
        "gradients": gradients,
        "reference": all(map(math.isfinite, exact["losses"].values())),
        # What a step means whose weights or batch are spoilt, nothing can tell.
        "made up": name == BATCHES[0] and job["kind"] != "state" and _is_made_up(run, reference),
    }


def _is_made_up(run: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Return True if a run has a number, or gradients, that the formula does not tend to where float64 has none."""
    exact = reference["fp64"][BATCHES[0]]
    beside = [near for near in reference["beside"] if near]
    if not exact or not beside:
        return False
    smaller = [made for name in ("halved", SMALLER) if (made := reference["fp64"][name])] or [exact]
    for place, itself in enumerate(exact["values"]):
        near, less = (torch.stack([other["values"][place] for other in runs]) for runs in (beside, smaller))
        if _has_no_limit_there(run["values"][place], itself, near, less):
            return True
    for name, loss in exact["losses"].items():
        near, less = (torch.tensor([other["losses"][name] for other in runs]) for runs in (beside, smaller))
        ours = torch.tensor(run["losses"][name])
        if name != SUM and _has_no_limit_there(ours, torch.tensor(loss), near, less):
            return True
    return any(_is_off_limit(run, exact, beside, name) for name in exact["gradients"] if name != SUM)


def _has_no_limit_there(ours: torch.Tensor, itself: torch.Tensor, near: torch.Tensor, smaller: torch.Tensor) -> bool:
    """Return True if `ours` is finite where `itself` is not, and is not what all finite neighbours come to.

    Where no neighbour is finite a NaN means nothing, but an infinity is meant, unless some smaller inputs are finite.
    """
    known = near.isfinite()
    low, high = (torch.where(known, near, fill) for fill in (math.inf, -math.inf))
    low, high = low.amin(0), high.amax(0)
    size = torch.where(known, near, 0.0).abs().amax().clamp(min=1e-30)
    agrees = (high - low <= 0.02 * size) & (ours - low >= -0.05 * size) & (ours - high <= 0.05 * size)
    is_meant = itself.isinf() & ~smaller.isfinite().any(0)
    wrong = torch.where(known.any(0), ~agrees, is_meant)
    return bool((ours.isfinite() & ~itself.isfinite() & wrong).any())


def _is_off_limit(run: dict[str, Any], exact: dict[str, Any], beside: list[dict[str, Any]], loss: str) -> bool:
    """Return True if the value is finite, and the gradients are far from those that all neighbours have in common."""
    if not math.isfinite(exact["losses"][loss]) or run["gradients"][loss]["scale"] is None:
        return False
    first, *others = (near["gradients"][loss]["values"] for near in beside)
    spread = [_distance(other, first) for other in others]
    if _distance(first, exact["gradients"][loss]["values"]) is not None or not all(
        off is not None and off < 0.05 for off in spread
    ):
        return False
    off = _distance(run["gradients"][loss]["values"], first)
    return off is not None and off > 0.3


def _error(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 1e-30) -> float:
    """Return the largest difference over the largest magnitude (at least the floor), where the reference is finite."""
    sound = theirs.isfinite()
    if not sound.any():
        return 0.0
    difference = (ours[sound] - theirs[sound]).abs().max()
    return float(difference / theirs[sound].abs().max().clamp(min=floor))


def _harm(ours: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, guilty: list[int], coarser: int) -> float:
    """Return the largest error of a healthy sample, 0 if it is as near to fp32 as it was under autocast before.

    Errors are relative to the sample's largest magnitude, or to a thousandth of the batch's if that is larger.
    """
    worst = 0.0
    floor = max(1e-3 * float(exact[exact.isfinite()].abs().max()), 1e-30) if exact.isfinite().any() else 1e-30
    for sample in set(range(len(ours) if ours.dim() else 0)) - set(guilty):
        before = _error(plain[sample], exact[sample], floor)
        off = min(_error(ours[sample], exact[sample], floor), _error(ours[sample], plain[sample], floor))
        if off > max(0.01, coarser * before) and plain[sample].isfinite().all():
            worst = max(worst, off)
    return worst


def _nearest(ours: Mapping[str, torch.Tensor], *references: Mapping[str, torch.Tensor] | None) -> float | None:
    """Return the distance from the nearest of the finite references; None without one."""
    distances = [_distance(ours, reference) for reference in references if reference is not None]
    return min((distance for distance in distances if distance is not None), default=None)


def _distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float | None:
    """Return the relative norm of the difference; None if the reference's gradients are missing or not finite."""
    names = ours.keys() & theirs.keys()
    if not names or not all(theirs[name].isfinite().all() for name in names):
        return None
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in names)
    norm = sum(float(theirs[name].double().square().sum()) for name in names)
    return math.sqrt(difference / norm) if norm else None


if __name__ == "__main__":
    main()
