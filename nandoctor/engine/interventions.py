"""Applies changes to a run, and undoes them: edits of modules and ops, and changes as they are printed."""

from __future__ import annotations

import dis
import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from nandoctor.autocast.literals import FP32_FOR_HALF
from nandoctor.autocast.policy import EXACT, LOW_DTYPES, REFERENCE
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.setting import SetLossScale, UseFormat
from nandoctor.engine.call import Call, Mode
from nandoctor.engine.module_state import is_large, widen_tensors
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import Change, ChangedFile, OpSite, SingleEdit, Snippet, SourcePatch
from nandoctor.evidence.trace import LOSS, Place
from nandoctor.ops import CASTS, UNFILLED
from nandoctor.process_wide import held
from nandoctor.torch_compat import tree_tensors, without_autocast
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines, intercepting
from nandoctor.tracing.op_tracer import full_rows
from nandoctor.tracing.tensor_stats import format_of
from nandoctor.trees import Parts, once, tree_map, walk

_UNLOWERED = {policy.format.name: policy for policy in (REFERENCE, EXACT)}


def choose_mode(edits: Sequence[SingleEdit], mode: Mode) -> Mode:
    """Return the mode with the precision and the loss scale that the edits ask for."""
    policy = mode.policy
    for edit in edits:
        if isinstance(edit, UseFormat):
            policy = _UNLOWERED.get(edit.format.name) or replace(policy, format=edit.format, ambient=True)
    scale = next((edit.value for edit in edits if isinstance(edit, SetLossScale)), mode.loss_scale)
    return replace(mode, policy=policy, loss_scale=scale)


def select_samples(edits: Sequence[SingleEdit], call: Call) -> Call:
    """Return the call with the samples that the edits keep."""
    kept = next((edit.samples for edit in edits if isinstance(edit, KeepSamples)), None)
    return call if kept is None else call.on_samples(kept)


@contextmanager
def intervene(
    edits: Sequence[SingleEdit], model: nn.Module, device: torch.device, owner: Callable[[], Place]
) -> Iterator[None]:
    """Apply the edits to modules and ops while the context is open; `owner` returns the running module call.

    What they change in the model, `restored` puts back.
    """
    kept = {edit.module: edit.children for edit in edits if isinstance(edit, KeepModule) and edit.module != LOSS}
    changes = _OpEdits(edits, owner)
    with (
        _modules_kept(kept, model, device) if kept else nullcontext(),
        intercepting(changes.handle) if changes.changes else nullcontext(),
    ):
        yield


@contextmanager
def loss_in_fp32(edits: Sequence[SingleEdit], device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Open a context for the loss function, and yield a function that prepares the output for it."""
    if not any(isinstance(edit, KeepModule) and edit.module == LOSS for edit in edits):
        yield lambda output: output
        return
    with torch.autocast(device.type, enabled=False):
        yield _widen


@contextmanager
def _modules_kept(kept: Mapping[str, bool], model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch autocast off by hooks around the modules in `kept`, and on again around children that are not kept."""
    modules = dict(model.named_modules())
    kept = {path: children for path, children in kept.items() if path in modules}  # others are built in the forward
    modes = {id(modules[path]): children for path, children in kept.items()}
    regions, in_files = _Regions(modes, device), is_large(model)
    for path, children in kept.items():
        own = (*modules[path].parameters(recurse=children), *modules[path].buffers(recurse=children))
        # With autocast off, low-precision weights would not fit fp32 inputs.
        widen_tensors(own, FP32_FOR_HALF, in_files=in_files)
    with ExitStack() as stack:
        for module in model.modules():
            pre = nn.Module.register_forward_pre_hook(module, regions.enter, with_kwargs=True, prepend=True)
            stack.callback(pre.remove)
            stack.callback(nn.Module.register_forward_hook(module, regions.leave, always_call=True).remove)
        stack.callback(regions.close)
        yield


class _OpenCall(NamedTuple):
    """An open module call: the region made for it, empty if none is needed, and autocast's state without that region.

    `depth` is how many regions were open when its forward began: if there are more, the model opened one itself.
    """

    module: nn.Module
    region: AbstractContextManager[Any]
    state: tuple[bool, torch.dtype]
    depth: int


class _Regions:
    """The autocast regions around the open module calls; `modes` has the ids of the modules in fp32.

    True means a module with all below it, False its forward alone, which gets its children's output in fp32.
    """

    def __init__(self, modes: Mapping[int, bool], device: torch.device) -> None:
        self._modes = modes
        self._device = device
        self._open: list[_OpenCall] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        name = self._device.type
        state = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
        region: AbstractContextManager[Any] = nullcontext()
        if self._is_in_kept_forward() and self._open[-1].depth == _autocast_depth():
            state = self._open[-1].state
            region = torch.autocast(name, dtype=state[1], enabled=state[0])
        if id(module) in self._modes:
            region = torch.autocast(name, enabled=False)
        region.__enter__()
        self._open.append(_OpenCall(module=module, region=region, state=state, depth=_autocast_depth()))
        return _widen((args, kwargs)) if id(module) in self._modes else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._open or self._open[-1].module is not module:
            return None
        self._open.pop().region.__exit__(None, None, None)
        return _widen(output) if self._is_in_kept_forward() else None

    def _is_in_kept_forward(self) -> bool:
        """Return True if the innermost open call is of a module whose forward alone is in fp32."""
        return bool(self._open) and self._modes.get(id(self._open[-1].module)) is False

    def close(self) -> None:
        while self._open:
            self._open.pop().region.__exit__(None, None, None)


def _autocast_depth() -> int:
    """Return how many autocast regions are open in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _widen(value: Any) -> Any:
    """Return the value with all low-precision tensors in it in fp32."""
    return tree_map(lambda it: it.float() if isinstance(it, torch.Tensor) and it.dtype in LOW_DTYPES else it, value)


class _OpEdits:
    """The edits among `edits` that change single ops; `owner` returns the running module call."""

    def __init__(self, edits: Sequence[SingleEdit], owner: Callable[[], Place]) -> None:
        self._owner = owner
        self._counts: Counter[tuple[Place, str]] = Counter()
        self.changes = [(edit, site) for edit in edits for site in edit.sites]

    def handle(self, call: Invocation, proceed: Proceed) -> Any:
        """Run one op, with the edits that apply to it."""
        owner = self._owner()
        run = proceed
        for edit, site in self.changes:
            # An in-place op can return neither a tensor of another dtype nor another tensor than its argument.
            possible = not call.signature.is_mutable or edit.works_in_place(has_out=bool(call.signature.written))
            if possible and self._is_meant(site, call, owner):
                run = partial(_run_changed, edit, proceed=run)
        output = run(call)
        # Counted as by the op tracer, which skips ops without a floating-point output.
        if any(format_of(leaf.dtype) for leaf in tree_tensors(output)):
            self._counts[owner, call.name] += 1
        return output

    def _is_meant(self, site: OpSite, call: Invocation, owner: Place) -> bool:
        if site.op not in ("", call.name):
            return False
        if site.source is None:
            return site.module == owner.module and self._counts[owner, call.name] == site.nth
        # No module runs while the loss or the backward of a custom Function does.
        is_there = site.module == LOSS or owner.type in ("", site.type)
        found = find_lines().source if is_there else None
        if found is None or (found.file, found.line) != (site.source.file, site.source.line):
            return False
        return site.source.column is None or found == site.source


def _run_changed(edit: SingleEdit, call: Invocation, proceed: Proceed) -> Any:
    return edit.run(_Running(call, proceed))


class _Running:
    """A `RunningOp`: an op that has been called; `proceed` runs it, with the edits that come after this one."""

    def __init__(self, call: Invocation, proceed: Proceed) -> None:
        self.name, self.is_mutable = call.name, call.signature.is_mutable
        self._call, self._proceed = call, proceed

    def argument(self, name: str) -> Any:
        return self._call.argument(name)

    def number(self, name: str) -> float | None:
        return dict(self._call.scalars()).get(name)

    def tensors(self) -> list[tuple[str, Any]]:
        return list(self._call.tensors())

    def lowest(self) -> float:
        dtypes = (tensor.dtype for _, tensor in self.tensors() if tensor.is_floating_point() and tensor.dim())
        return torch.finfo(next(dtypes, torch.float32)).min

    def run(self, /, **arguments: Any) -> Any:
        call = self._call
        for name, value in arguments.items():
            given = self.argument(name)
            if name in call.signature.changed and isinstance(given, torch.Tensor):
                given.copy_(value)
            else:
                call = call.with_argument(name, value)
        return self._proceed(call)

    def run_in_fp32(self) -> Any:
        """A composite op passes its operand's dtype on, as cross_entropy does to log_softmax.

        Memory keeps its format: `torch.tensor` asks for it, and then writes numbers of that format into it.
        """
        wide = self._call.mapped(_widen)
        if self.name not in CASTS | UNFILLED and self.argument("dtype") in LOW_DTYPES:
            wide = wide.with_argument("dtype", torch.float32)
        with without_autocast():
            return self._proceed(wide)

    def full_rows(self) -> Any:
        return full_rows(self._call)


_HOLDERS = (FunctionType, type, property, staticmethod, classmethod)
_EMPTY_CELL = CellType()


class CannotRunError(NanDoctorError):
    """The changed text cannot be run in this process: the module would have to be imported again."""

    def __init__(self, why: str) -> None:
        super().__init__(why, remedy="Apply the patch and run `nandoctor verify` in a new process.")


@contextmanager
def printed_changes(changes: Sequence[Change], model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Run with `changes` made to the source, which is restored, and to the model, which the run restores itself.

    Every live function of a changed file is given its code from the new text. It keeps its identity, closure and
    defaults, so modules, decorators and hooks that hold it need not be built again; see `function.__code__` in
    https://docs.python.org/3/reference/datamodel.html. Functions are found in the imported modules, in the
    classes of the model's modules and in the loss, through decorators and down to the functions that these have made.

    Raises:
        CannotRunError: no live function has the changed code, or its closure or the module's own statements change
            as well; or a snippet raised.
    """
    with ExitStack() as undo:
        for file in (file for change in changes if isinstance(change, SourcePatch) for file in change.files):
            swaps = _find_swaps(file, model, loss)
            # No change imports anything else.
            imports_torch = "import torch" in {*file.after.splitlines()} - {*file.before.splitlines()}
            spaces = [function.__globals__ for function, _ in swaps] if imports_torch else []
            for space in (space for space in spaces if "torch" not in space):
                space["torch"] = torch
                undo.callback(space.pop, "torch", None)
            undo.enter_context(held(*((function, "__code__", code) for function, code in swaps)))
        for change in changes:
            if isinstance(change, Snippet):
                try:
                    exec(compile(change.text, "<fix>", "exec"), {"model": model, "torch": torch})
                except Exception as error:
                    raise CannotRunError(f"The snippet raised {type(error).__name__}: {error}") from error
        yield


def _find_swaps(file: ChangedFile, model: nn.Module, loss: Any) -> list[tuple[FunctionType, CodeType]]:
    """Return the live functions that a file changes, each with its new code; raise as `printed_changes` does."""
    changed = _changed_codes(file)
    found = _functions_with(changed, reachable(file.path, model, loss))
    if not found:
        raise CannotRunError(f"No function that is loaded comes from the changed lines of {file.path}.")
    swaps = [(function, changed[_key(function.__code__)]) for function in found]
    for function, code in swaps:
        if code.co_freevars != function.__code__.co_freevars:
            raise CannotRunError(f"The change gives {function.__qualname__} other closure variables.")
        _bind_names(function, code)
    return swaps


def _bind_names(function: FunctionType, code: CodeType) -> None:
    """Let a script, of which only what was needed has run, bind the names that the new code reads."""
    ask = function.__globals__.get("__getattr__")
    if not callable(ask):
        return
    instructions = chain.from_iterable(map(dis.get_instructions, _all_codes(code)))
    for name in {it.argval for it in instructions if it.opname == "LOAD_GLOBAL"} - function.__globals__.keys():
        with suppress(AttributeError):
            ask(name)


@lru_cache(maxsize=16)  # a search runs each change about ten times
def _changed_codes(file: ChangedFile) -> Mapping[tuple[object, ...], CodeType]:
    """Return the new code of the functions that change, or hold one that does, by the key of their present code."""
    try:
        texts = (text.removeprefix("\ufeff") for text in (file.before, file.after))
        old, new = (compile(text, file.path, "exec", dont_inherit=True) for text in texts)
    except SyntaxError as error:
        raise CannotRunError(f"The changed text is not Python: {error}") from error
    (_, *ours), (_, *theirs) = _all_codes(old), _all_codes(new)
    if [code.co_qualname for code in ours] != [code.co_qualname for code in theirs]:
        raise CannotRunError("The change adds or removes a function.")
    return {_key(was): now for was, now in zip(ours, theirs, strict=True) if _own(was) != _own(now)}


def _functions_with(keys: Container[tuple[object, ...]], reachable: Iterable[FunctionType]) -> list[FunctionType]:
    """Return every live function whose code has one of these keys; `reachable` are those that are known in its file.

    Not by gc.get_objects(): it returns tuples that another thread is still building, which breaks that thread
    (https://github.com/python/cpython/issues/59313). Asking for the referrers of a code object is safe. It takes 2 ms
    in a process of nandoctor's own, and 20 ms in one that has just imported torch.
    """
    known = list({id(function): function for function in reachable}.values())
    wanted = {id(code): code for function in known for code in _all_codes(function.__code__) if _key(code) in keys}
    # The referrers lack what was frozen by `gc.freeze()`, as a server or a test session does.
    holders = (*known, *gc.get_referrers(*wanted.values()))
    found = (it for it in holders if type(it) is FunctionType and id(it.__code__) in wanted)
    return list(dict.fromkeys(found))


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those inside it, the bodies of functions and classes, in the order of the text."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


def reachable(path: str, model: nn.Module, loss: Any = None) -> Iterator[FunctionType]:
    """Yield the file's functions that the model's classes, its modules and the loss hold, also inside decorators."""
    loaded = (getattr(module, "__dict__", {}) for module in list(sys.modules.values()))
    of_file = [names for names in loaded if names.get("__file__") == path]
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    held = (part for module in model.modules() for part in _parts(dict(vars(module))).values())
    waiting = deque[Any]((*kinds, *held, loss, *of_file))
    parts_of = once(_parts)
    while waiting:
        for _, item in walk(waiting.popleft(), parts_of):
            if type(item) is not FunctionType:
                continue
            is_of_file = item.__code__.co_filename == path
            if is_of_file:
                yield item
            if is_of_file or "__file__" not in item.__globals__:  # code outside sys.modules, or a notebook's cells
                waiting.append(item.__globals__)


def _parts(item: Any) -> Parts:
    """Return what may hold a function in a namespace, class, descriptor or closure."""
    inside: Iterable[Any] = ()
    if isinstance(item, dict):
        inside = list(item.values())
    elif isinstance(item, type):
        inside = list(vars(item).values())
    elif type(item) is FunctionType:
        closed = (cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY_CELL)
        inside = vars(item).get("__wrapped__"), *closed
    elif isinstance(item, property):
        inside = item.fget, item.fset
    elif isinstance(item, staticmethod | classmethod):
        inside = (item.__func__,)
    return dict(enumerate(part for part in inside if isinstance(part, _HOLDERS)))


def _key(code: CodeType) -> tuple[object, ...]:
    """Return a code's place and content, which tell it from that of another text and from other lambdas in its line."""
    return code.co_name, code.co_firstlineno, repr(_own(code))


def _own(code: CodeType) -> tuple[object, ...]:
    """Return what a code and those inside it do, wherever they stand: repr tells 0.0 from -0.0 and 1 from True."""
    constants = [_own(it) if isinstance(it, CodeType) else repr(it) for it in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
