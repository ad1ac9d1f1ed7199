"""Compare the dtypes of the emulated autocast with torch's own CUDA autocast, op by op, without a GPU.

For each of `autocast_models` it prints how many ops were compared and how many dtypes differ; then the ops that could
not be compared, with the reason.

A fake tensor on "cuda" goes through torch's real AutocastCUDA kernels before any device is touched. Every op that the
emulated replay records is called this way with its recorded shapes and dtypes, in the autocast state that it ran in;
the dtypes of the results must be equal. Fake tensors have no values to compare. What a composite op does on a device
that this build is not linked with cannot be checked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from autocast_models import MODELS, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nandoctor.autocast.kernels import LISTS
from nandoctor.autocast.policy import Policy, apply_policy
from nandoctor.evidence.formats import BF16, FP16, FloatFormat
from nandoctor.tracing.dispatch_hook import Invocation
from nandoctor.tracing.op_tracer import OpTracer

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """An op as the emulation ran it: the call, the autocast state around it, and the dtypes of its results."""

    call: Invocation
    enabled: bool
    dtype: torch.dtype
    gave: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Torch's answer for one op: the dtypes, or the reason why it could not be run."""

    ran: Ran
    gives: tuple[torch.dtype, ...] | None
    reason: str = ""

    @property
    def differs(self) -> bool:
        """True if torch gives other dtypes than the emulation."""
        return self.gives is not None and self.gives != self.ran.gave


def record(name: str, low: FloatFormat) -> list[Ran]:
    """Run one model's forward under the emulation, and return its ops."""
    make, shapes = MODELS[name]
    torch.manual_seed(0)
    model, ran = make(), []

    def note(_order: int, call: Invocation, output: Any) -> None:
        state = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        ran.append(Ran(call=call, enabled=state[0], dtype=state[1], gave=dtypes_of(output)))

    tracer = OpTracer(known=(), on_op=note)
    with apply_policy(Policy(name="cuda", format=low), CPU), tracer.watching(lambda: ("", "", 0)):
        model(*make_inputs(shapes))
    return ran


def dtypes_of(output: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the tensors in an op's output, in order."""
    return tuple(leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def ask(ran: Ran) -> Verdict:
    """Run the op on fake tensors under torch's CUDA autocast."""
    if str(ran.call.op).removeprefix("aten.") in LISTS["cudnn_rnn"]:
        return Verdict(ran=ran, gives=None, reason="cuDNN has an autocast kernel of its own, which this build lacks")
    with FakeTensorMode() as mode, torch.no_grad(), cuda_state(ran.enabled, ran.dtype):
        try:
            call = ran.call.mapped(lambda value: to_cuda(value, mode))
            return Verdict(ran=ran, gives=dtypes_of(call.run()))
        except Exception as error:  # whatever this build lacks for the op
            return Verdict(ran=ran, gives=None, reason=str(error).strip().splitlines()[0][:70])


def to_cuda(value: Any, mode: FakeTensorMode) -> Any:
    """Return a fake tensor on "cuda" like this one; a Python number that torch wrapped stays on the CPU."""
    if isinstance(value, torch.Tensor):
        device = "cpu" if value.dim() == 0 and not value.requires_grad and is_number(value) else "cuda"
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return torch.device("cuda") if isinstance(value, torch.device) else value


def is_number(value: torch.Tensor) -> bool:
    """Return True if this may be a Python number in a tensor: torch keeps those in its widest dtypes."""
    return value.dtype in (torch.float64, torch.int64)


@contextmanager
def cuda_state(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set CUDA's autocast to this state in this context."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def judge(name: str, low: FloatFormat) -> list[Verdict]:
    """Return torch's answer for every op of one model."""
    return [ask(ran) for ran in record(name, low)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(MODELS), help="names of models")
    chosen = parser.parse_args().only
    print(f"torch {torch.__version__}, {len(chosen)} models, each under fp16 and bf16\n")
    print(f"{'model':<36} {'ops':>5} {'asked':>6} {'differ':>7}")
    total: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for name in chosen:
        verdicts = [verdict for low in (FP16, BF16) for verdict in judge(name, low)]
        counts = {
            "ops": len(verdicts),
            "asked": sum(verdict.gives is not None for verdict in verdicts),
            "differ": sum(verdict.differs for verdict in verdicts),
        }
        total.update(counts)
        print(f"{name:<36} {counts['ops']:>5} {counts['asked']:>6} {counts['differ']:>7}")
        for verdict in verdicts:
            if verdict.differs:
                print(f"    {verdict.ran.call.op}: emulated {verdict.ran.gave}, torch {verdict.gives}")
            elif verdict.gives is None:
                reasons[str(verdict.ran.call.op), verdict.reason] += 1
    share = total["asked"] / total["ops"]
    print(f"{'all':<36} {total['ops']:>5} {total['asked']:>6} {total['differ']:>7}   {share:.1%} could be asked\n")
    for (op, reason), count in reasons.most_common():
        print(f"  not asked: {op} ({count} times): {reason}")


if __name__ == "__main__":
    main()
