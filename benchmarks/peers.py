"""Compare nandoctor with four other ways to find where a NaN comes from, on the sick models of the tests.

`python benchmarks/peers.py` prints for each of them how many modules and ops it names correctly, how often it raises a
false alarm, and what it costs.

Each runs one training step of the case, with its loss, under the emulated CUDA autocast. Its report is read in its
favour: an infinite input blames the enclosing module, or the batch if that is non-finite; naming a leaf (a Linear)
counts as naming its op; a traceback that shows the right line names its module; a cast inside an emulated product
names the product. Needs `pip install --no-deps torchlens` (and tqdm, graphviz, pandas, safetensors, pillow).
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from sick_models import LOSS, Case, all_cases, decoyed, healthy_models
from sick_models.judging import diagnose
from sick_models.probing import float_tensors
from torch import Tensor, nn

import nandoctor
from nandoctor.autocast import kernels
from nandoctor.autocast.policy import cuda_autocast
from nandoctor.evidence.report import NOTHING_FOUND
from nandoctor.ops import PRODUCTS

NOT_OF_THE_STEP = (str(Path(torch.__file__).parent), str(Path(nandoctor.__file__).parent), __file__)
ROW = "{:<36} {:>9} {:>9} {:>12} {:>13} {:>14} {:>8} {:>11} {:>6}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a tool says about one step: whether anything is wrong, and where; `line` is a source line that it shows."""

    alarm: bool = False
    module: str | None = None
    op: str = ""
    line: str = ""
    crashed: bool = False


HEALTHY = Claim()
Tool = Callable[[Case], Claim]


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    tools: dict[str, Tool] = {
        "nandoctor": ask_nandoctor,
        "plain hooks with isfinite": ask_plain_hooks,
        "transformers DebugUnderflowOverflow": ask_transformers,
        "torch.autograd.detect_anomaly": ask_anomaly_mode,
        "TorchLens find_nan": ask_torchlens,
    }
    sick = all_cases()
    twins = [case.twin() for case in sick]
    decoys = [*healthy_models(), *map(decoyed, twins)]
    print(f"{len(sick)} sick models, {len(twins)} healthy twins, {len(decoys)} that look ill and are not\n")
    titles = ("module", "op", "not noticed", "alarm: twins", "alarm: decoys", "crashes", "CPU ms/step", "ratio")
    print(ROW.format("", *titles))
    _ask_all(take_plain_step, sick)  # warms up torch
    _, plain_ms = _ask_all(take_plain_step, sick)
    print(ROW.format("(the step alone)", *[""] * 6, f"{plain_ms:.0f}", "1.0"))
    for name, ask in tools.items():
        claims, elapsed_ms = _ask_all(ask, sick)
        alarms = [sum(claim.alarm for claim in _ask_all(ask, group)[0]) for group in (twins, decoys)]
        pairs = list(zip(sick, claims, strict=True))
        print(
            ROW.format(
                name,
                f"{sum(names_module(case, claim) for case, claim in pairs)} of {len(sick)}",
                f"{sum(names_op(case, claim) for case, claim in pairs)} of {len(sick)}",
                sum(not claim.alarm for claim in claims),
                *alarms,
                sum(claim.crashed for claim in claims),
                f"{elapsed_ms:.0f}",
                f"{elapsed_ms / plain_ms:.1f}",
            ),
            flush=True,
        )


def _ask_all(ask: Tool, cases: Sequence[Case]) -> tuple[list[Claim], float]:
    """Return the tool's claims and the CPU time per case in ms, of this process only: the machine may be busy."""
    _guarded(ask, cases[0])  # imports and caches
    started = time.process_time()
    claims = [_guarded(ask, case) for case in cases]
    return claims, 1000 * (time.process_time() - started) / len(cases)


def _guarded(ask: Tool, case: Case) -> Claim:
    """Return the tool's claim; if the tool raises, that it crashed."""
    noise = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        torch.manual_seed(0)
        try:
            return ask(case)
        except Exception:
            return Claim(crashed=True)


def names_module(case: Case, claim: Claim) -> bool:
    """Return True if the claim has the right module, or shows the line at fault."""
    shows_line = bool(case.line) and case.line in claim.line
    return claim.alarm and (claim.module == case.module or shows_line)


def names_op(case: Case, claim: Claim) -> bool:
    """Return True if the op has one of its right names; for a non-finite state or batch, its owner is enough."""
    return names_module(case, claim) and (not case.op or _plain(claim.op) in _other_names(case.op))


def _plain(op: str) -> str:
    """Return the aten name, if there is one, of add_, __truediv__, SqrtBackward0 or Conv2d."""
    name = re.sub(r"Backward\d*$", "", op).strip("_").removeprefix("native_")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    operators = {"truediv": "div", "rtruediv": "div", "iadd": "add", "imul": "mul", "isub": "sub", "radd": "add"}
    return operators.get(name, name)


def _other_names(op: str) -> set[str]:
    """Return the names by which a tool may know an op: of its kernel, its graph node, or the emulation's last cast."""
    names = {op, _plain(op), f"safe_{op}"}
    if op in PRODUCTS:
        names |= PRODUCTS.keys() | {"to_copy", "to", "thnn_fused_lstm_cell"}
    if op in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        names |= {"cross_entropy", "nll_loss", "nll_loss_2d", "cross_entropy_loss"}
    return names | ({"var", "std", "std_mean"} if op in ("var", "std") else set())


# --- nandoctor -------------------------------------------------------------------------------------------------------


def ask_nandoctor(case: Case) -> Claim:
    """Diagnose a dump file, as a user would: in two precisions, op by op, with an analysis."""
    with tempfile.TemporaryDirectory() as folder:
        report = diagnose(case, Path(folder))
    if report.origin is None:
        return Claim(alarm=report.verdict not in NOTHING_FOUND)
    origin = report.origin
    return Claim(
        alarm=True, module=origin.place.module, op=origin.op or "", line=origin.source.text if origin.source else ""
    )


# --- a step, for the others ------------------------------------------------------------------------------------------


def _loss(case: Case, output: Any, batch: dict[str, Tensor]) -> Tensor:
    if case.loss is not None:
        return case.loss(output, batch)
    return torch.stack([tensor.float().mean() for tensor in float_tensors(output)]).sum()


def _backward(case: Case, loss: Tensor) -> None:
    """Run the backward pass outside of autocast, at the case's loss scale, as with GradScaler."""
    with torch.autocast("cpu", enabled=False):
        (loss * case.loss_scale).backward()


def _finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in float_tensors(value))


def _around(module: str) -> str:
    return module.rpartition(".")[0]


def take_plain_step(case: Case) -> Claim:
    """Run the step that the tools watch, without a tool."""
    model, batch = case.build().train(case.train), case.batch()
    with cuda_autocast(torch.float16):
        _backward(case, _loss(case, case.call(model, batch), batch))
    return HEALTHY


# --- plain hooks -----------------------------------------------------------------------------------------------------


class _Found(Exception):  # noqa: N818
    """An exception that carries the claim out of a hook; not an error."""

    def __init__(self, claim: Claim) -> None:
        super().__init__()
        self.claim = claim


def ask_plain_hooks(case: Case) -> Claim:
    """Check every module's inputs and outputs, the loss, then the gradients, as most people would write it.

    When a module is found, the batch is checked before the module is blamed.
    """
    try:
        _step(case, _hook_forward)
        _step(case, _hook_backward)
    except _Found as found:
        return found.claim
    return HEALTHY


def _step(case: Case, hook: Callable[[str, nn.Module], None]) -> None:
    model, batch = case.build().train(case.train), case.batch()
    for path, module in model.named_modules():
        hook(path, module)
    with cuda_autocast(torch.float16):
        try:
            loss = _loss(case, case.call(model, batch), batch)
        except _Found as found:
            raise found if _finite(batch) else _Found(Claim(alarm=True, module="")) from None
        if not _finite(loss):
            raise _Found(Claim(alarm=True, module=LOSS if _finite(batch) else ""))
        _backward(case, loss)
    for name, weight in model.named_parameters():
        if weight.grad is not None and not _finite(weight.grad):
            raise _Found(Claim(alarm=True, module=_around(name)))


def _hook_forward(path: str, module: nn.Module) -> None:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not _finite((args, kwargs)):
            raise _Found(Claim(alarm=True, module=_around(path)))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if not _finite(output):
            raise _Found(Claim(alarm=True, module=path, op=_leaf_name(module)))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _hook_backward(path: str, module: nn.Module) -> None:
    def backward(_: nn.Module, outgoing: Any, incoming: Any) -> None:
        if _finite(incoming) and not _finite(outgoing):
            raise _Found(Claim(alarm=True, module=path, op=_leaf_name(module)))

    module.register_full_backward_hook(backward)


def _leaf_name(module: nn.Module) -> str:
    return "" if list(module.children()) else type(module).__name__


# --- transformers ----------------------------------------------------------------------------------------------------


def ask_transformers(case: Case) -> Claim:
    """Run its debugger: the last frame names the module, the first remark whether its input was non-finite."""
    from transformers.debug_utils import DebugUnderflowOverflow

    model, batch = case.build().train(case.train), case.batch()
    debugger, printed = DebugUnderflowOverflow(model, max_frames_to_save=1), io.StringIO()
    try:
        with cuda_autocast(torch.float16), contextlib.redirect_stdout(printed):
            case.call(model, batch)
    except ValueError as error:
        if "DebugUnderflowOverflow" not in str(error):
            raise
        claim = _read_frames(printed.getvalue(), debugger)
        return claim if _finite(batch) else Claim(alarm=True, module="")
    return HEALTHY


def _read_frames(text: str, debugger: Any) -> Claim:
    place = re.search(r"^(\S+) has (?:nans|infs)$", text, re.MULTILINE)
    headers = re.findall(rf"^{debugger.prefix} ((?:\S+)?) ?(\S+)$", text, re.MULTILINE)
    module, kind = headers[-1] if headers else ("", "")
    if place is not None and place[1].startswith("input"):  # it can stop without saying what it saw
        return Claim(alarm=True, module=_around(module))
    return Claim(alarm=True, module=module, op=kind)


# --- autograd's anomaly mode -----------------------------------------------------------------------------------------


def ask_anomaly_mode(case: Case) -> Claim:
    """Run anomaly mode, which names a graph node and shows the traceback of the forward call that made it."""
    model, batch = case.build().train(case.train), case.batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(), cuda_autocast(torch.float16):
                _backward(case, _loss(case, case.call(model, batch), batch))
        except RuntimeError as error:
            node = re.match(r"Function '(\w+)' returned nan values", str(error))
            if node is None:
                raise
            traceback = "".join(str(warning.message) for warning in caught if "forward call" in str(warning.message))
            return Claim(alarm=True, op=node[1], line=_innermost_line(traceback))
    return HEALTHY


def _innermost_line(traceback: str) -> str:
    """Return a traceback's last line in the step's code, outside of torch, the emulated autocast and this file."""
    frames = re.findall(r'File "(.+)", line (\d+), in ', traceback)
    own = [(file, int(line)) for file, line in frames if not file.startswith(NOT_OF_THE_STEP)]
    return linecache.getline(*own[-1]).strip() if own else ""


# --- TorchLens -------------------------------------------------------------------------------------------------------


class _Step(nn.Module):
    """The model's call and loss as one module, since TorchLens passes inputs by position."""

    def __init__(self, case: Case, names: list[str]) -> None:
        super().__init__()
        self.model = case.build().train(case.train)
        self._case, self._names = case, names

    def forward(self, *arrays: Tensor) -> Any:
        batch = dict(zip(self._names, arrays, strict=True))
        output = self._case.call(self.model, batch)
        return _loss(self._case, output, batch)  # _without_step knows this line


def ask_torchlens(case: Case) -> Claim:
    """Return the first op that makes a NaN or an infinity in the forward or loss, else in the backward."""
    import torchlens
    from torchlens.debug import _nan, bisect_nan_backward, find_nan

    _nan._exception_source_line = _line_of_the_step
    batch = case.batch()
    with _unlogged_kernels(), cuda_autocast(torch.float16):
        forward = find_nan(_Step(case, list(batch)), list(batch.values()))
        if forward.found and forward.func_name == "none" and forward.module_address is None:
            return Claim(alarm=True, module="")  # an input of the step; a buffer has a module
        if forward.found:
            return _claim_of_torchlens(forward.module_address, forward.source_line, forward.func_name or "")
        saving = torchlens.options.CaptureOptions(save_grads=True)
        step = _Step(case, list(batch))
        trace = torchlens.trace(step, list(batch.values()), capture=saving)
        _backward(case, trace[trace.output_layers[0]].out)
    backward = bisect_nan_backward(trace)
    first = backward.birth  # its name for where a gradient goes non-finite
    if first is None:  # it cannot tell for every node; non-finite gradients count as an alarm
        return Claim(alarm=backward.found or not _finite([weight.grad for weight in step.parameters()]))
    return _claim_of_torchlens(first.module, first.source_line, first.grad_fn_class)


@contextlib.contextmanager
def _unlogged_kernels() -> Iterator[None]:
    """Show TorchLens each kernel of the emulated autocast as one op, like torch's own, not the casts inside."""
    from torchlens._state import pause_logging

    make = kernels._make_kernel

    def make_unlogged(*made_of: Any) -> Callable[..., Any]:
        kernel = make(*made_of)

        def paused(*args: Any, **kwargs: Any) -> Any:
            with pause_logging():
                return kernel(*args, **kwargs)

        return paused

    kernels._make_kernel = make_unlogged
    try:
        yield
    finally:
        kernels._make_kernel = make


def _line_of_the_step(error: BaseException) -> str | None:
    """Return the last line of the step; TorchLens itself names the emulated autocast, which handles every call."""
    others = (*NOT_OF_THE_STEP, str(Path(sys.modules["torchlens"].__file__ or "").parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _claim_of_torchlens(address: str | None, source_line: str | None, op: str) -> Claim:
    file, _, line = (source_line or "").rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line else ""
    return Claim(alarm=True, module=_without_step(address, source_line), op=op, line=text)


def _without_step(address: str | None, source_line: str | None) -> str:
    """Turn `model.layer.linear` into `layer.linear`; calls of the step itself, in no module, are the loss."""
    file, _, line = (source_line or "").rpartition(":")
    if address is None or (file == __file__ and "_loss(" in linecache.getline(file, int(line))):
        return LOSS
    return address.partition(":")[0].removeprefix("model").removeprefix(".")


if __name__ == "__main__":
    main()
