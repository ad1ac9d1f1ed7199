"""An examiner of its own, sharing only the emulation of CUDA autocast: runs a case, finds the first non-finite value.

In: a case. Out: `Outcome`, what was finite; `NonfiniteSource`, the op, module and line that made the first value.
"""
# mypy: disable-error-code=no-untyped-call

from __future__ import annotations

import bisect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nandoctor.autocast.policy import cuda_autocast
from sick_models.case import LOSS, Batch, Case

HERE = Path(__file__).parent
EXAMINERS = {__file__, str(HERE / "test_corpus.py")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step of a case gave. `gradients` and `weights` map parameter names to what the step left in them.

    `optimizer` is the optimizer's state dict after the step, where the case has an optimizer.
    """

    output: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]

    @property
    def first_nonfinite(self) -> str:
        """The first of output, loss, gradients and weights that is not finite; "" where all are."""
        stages = {
            "output": self.output,
            "loss": [self.loss],
            "gradients": list(self.gradients.values()),
            "weights": list(self.weights.values()),
        }
        return next((name for name, tensors in stages.items() if not all(map(finite, tensors))), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteSource:
    """The first non-finite value that finite ones made, or the first NaN that was made of none.

    `ops` holds the names that the op goes by: the kernel's, and that of the torch function which the user called.
    """

    phase: str
    module: str
    ops: frozenset[str]
    line: str


def run(case: Case, *, autocast: bool) -> Outcome:
    """One training step of the case under emulated CUDA autocast or in plain fp32."""
    return _step(case, autocast=autocast, witness=None)


def first_birth(case: Case, *, autocast: bool) -> NonfiniteSource | None:
    """The first nonfinite_source in forward or loss; in backward where the forward absorbed whatever it made."""
    witness = Witness()
    outcome = _step(case, autocast=autocast, witness=witness)
    backward_only = outcome.first_nonfinite == "gradients"
    return next((b for b in witness.nonfinite_sources if not backward_only or b.phase == "backward"), None)


def distance(outcome: Outcome, reference: Outcome) -> float:
    """Norm of the difference of the outputs over the norm of the reference."""
    ours = torch.cat([tensor.double().flatten() for tensor in outcome.output])
    theirs = torch.cat([tensor.double().flatten() for tensor in reference.output])
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def float_tensors(tree: Any) -> list[Tensor]:
    """Every floating-point or complex tensor in a nest of containers and dataclasses."""
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def _step(case: Case, *, autocast: bool, witness: Witness | None) -> Outcome:
    model, batch = case.build().train(case.train), case.batch()
    if not autocast:
        model = model.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with _precision(autocast=autocast):
            with witness.watching(model) if witness else nullcontext():
                output = case.call(model, batch)
                loss = (case.loss or _any_loss)(output, batch)
            # Backward belongs outside autocast; the emulation stays, for blocks that checkpointing computes again.
            outside = torch.autocast("cpu", enabled=False)
            with outside, witness.watching_backward() if witness else nullcontext():
                (loss * case.loss_scale).backward()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    optimizer = case.optimizer(model.parameters()) if case.optimizer else None
    if optimizer is not None:
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in named.items()}
    leaves = [tensor.detach() for tensor in float_tensors(output)]
    return Outcome(
        output=leaves,
        loss=loss.detach(),
        gradients=gradients,
        weights=weights,
        optimizer=optimizer.state_dict() if optimizer else {},
    )


@contextmanager
def _precision(*, autocast: bool) -> Iterator[None]:
    if not autocast:
        yield
        return
    with cuda_autocast(torch.float16):
        yield


def _any_loss(output: Any, _batch: Batch) -> Tensor:
    return torch.stack([tensor.float().mean() for tensor in float_tensors(output)]).sum()


class Witness:
    """Watches a forward and then its backward, and notes every nonfinite_source."""

    def __init__(self) -> None:
        self.nonfinite_sources: list[NonfiniteSource] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        self.diary = Diary()
        # In anomaly mode every node of the graph keeps the stack of its creation; the check for NaN is not wanted.
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        with self.diary.reading(model), self.diary, Midwife(self._in_forward), anomaly:
            yield

    @contextmanager
    def watching_backward(self) -> Iterator[None]:
        with Midwife(self._in_backward):
            yield

    def _in_forward(self, kernel: str) -> None:
        module, function = self.diary.now
        phase = "loss" if module == LOSS else "forward"
        self._note(phase, module, _names(kernel, function), _line_of_frames())

    def _in_backward(self, kernel: str) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            module, function = self.diary.at(node._sequence_nr())
            made_by = re.sub(r"Backward\d*$", "", node.name())
            metadata: Any = node.metadata
            line = _line_of_traceback(metadata.get("traceback_", []))
            self._note("backward", module, _names(made_by, function), line)

    def _note(self, phase: str, module: str, ops: frozenset[str], line: str) -> None:
        self.nonfinite_sources.append(NonfiniteSource(phase=phase, module=module, ops=ops, line=line))


class Diary(TorchFunctionMode):
    """Which module and which torch function were running when the autograd graph had how many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = [LOSS]
        self.functions = [""]
        self.entries: list[tuple[int, str, str]] = []
        self._enter()

    @property
    def now(self) -> tuple[str, str]:
        return self.modules[-1], self.functions[-1]

    def at(self, sequence_number: int) -> tuple[str, str]:
        index = bisect.bisect_right(self.entries, sequence_number, key=lambda entry: entry[0]) - 1
        return self.entries[index][1:]

    def _enter(self) -> None:
        self.entries.append((torch.autograd._get_sequence_nr(), *self.now))  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._inside(self.functions, func.__name__):
            return func(*args, **(kwargs or {}))

    @contextmanager
    def _inside(self, stack: list[str], name: str) -> Iterator[None]:
        stack.append(name)
        self._enter()
        yield
        stack.pop()
        self._enter()

    @contextmanager
    def reading(self, model: nn.Module) -> Iterator[None]:
        handles = [handle for path, module in model.named_modules() for handle in self._hook(path, module)]
        yield
        for handle in handles:
            handle.remove()

    def _hook(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            self.modules.append(path)
            self._enter()

        def leave(*_: Any) -> None:
            self.modules.pop()
            self._enter()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)


class Midwife(TorchDispatchMode):
    """Tells of every kernel that makes something non-finite of finite operands, or NaN of operands without NaN."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kernel = func.overloadpacket.__name__
        operands = _numbers((args, kwargs))
        all_finite = all(map(finite, operands))
        any_nan = any(bool(operand.isnan().any()) for operand in operands)
        result = func(*args, **kwargs)
        if "empty" not in kernel:  # memory that nobody has written to yet can hold anything
            made = float_tensors(result)
            made_here = all_finite and not all(map(finite, made))
            if made_here or (not any_nan and any(bool(tensor.isnan().any()) for tensor in made)):
                self.tell(kernel)
        return result


def _numbers(tree: Any) -> list[Tensor]:
    """The floating-point operands, Python numbers among them."""
    return float_tensors(tree) + [torch.tensor(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, float)]


def _names(*names: str) -> frozenset[str]:
    return frozenset(_plain(name) for name in names if name)


def _plain(name: str) -> str:
    """aten::_softmax, native_dropout, nll_loss_forward, add_, __truediv__, SqrtBackward0 -> the name users know."""
    operators = {"truediv": "div", "rtruediv": "div", "itruediv": "div", "iadd": "add", "imul": "mul", "isub": "sub"}
    plain = name.strip("_").removeprefix("native_").removesuffix("_forward")
    plain = plain if plain in ("rsqrt", "relu") or not name.startswith("__r") else plain.removeprefix("r")
    return operators.get(plain, plain)


def _line_of_frames() -> str:
    """The innermost source line of the corpus that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(HERE)) and file not in EXAMINERS:
            return linecache.getline(file, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def _line_of_traceback(entries: list[str]) -> str:
    """The same, from the formatted stack in which autograd's anomaly mode keeps it."""
    for entry in reversed(entries):
        match = re.match(r'\s*File "(.+)", line (\d+), in ', entry)
        if match and match[1].startswith(str(HERE)) and match[1] not in EXAMINERS:
            return linecache.getline(match[1], int(match[2])).strip()
    return ""
