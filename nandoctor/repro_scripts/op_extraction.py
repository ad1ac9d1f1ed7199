"""Extract the ops around an origin from a run, with their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch

from nandoctor.autocast.policy import torch_dtype
from nandoctor.changes.places import ancestors
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.trace import OpCall
from nandoctor.replaying.runner import FailingStep, Watch
from nandoctor.repro_scripts.program import METHOD, Mode, Node, Program, Ref, kinds_of
from nandoctor.torch_compat import is_wrapped, schema_of, tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation
from nandoctor.trees import tree_map

NOT_THE_SAME = "The step gives different results from run to run: pass --seed, and make the forward deterministic."

_MAX_DEPTH = 8
_MAX_OPS = 24
_LEAF_NAMES = {
    **dict.fromkeys(("self", "input", "tensors[0]"), "x"),
    **dict.fromkeys(("other", "mat2", "tensor2", "vec2", "tensors[1]"), "y"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedOp:
    """One op as it ran; `taken` are the values of its input tensors at that time by their `id`, `given` its outputs."""

    call: Invocation
    taken: Mapping[int, torch.Tensor]
    trained: frozenset[int]
    given: tuple[torch.Tensor, ...]


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """The incoming gradient of a backward pass, and the index of the result that it belongs to."""

    item: int = 0
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedOps:
    """The op `target` and those before it, by their order; `low` is autocast's dtype."""

    target: int
    pieces: Mapping[int, _RecordedOp]
    ops: Mapping[int, OpCall]
    low: torch.dtype
    gradient: _Gradient | None = None
    nodes: dict[int, tuple[str, Mode]] = field(default_factory=dict)

    def program(self, orders: Iterable[int]) -> Program:
        """Return a program of the ops with these orders; inputs from other ops become leaves."""
        return _Assembly(self, sorted(orders)).program()

    def suppliers(self, orders: Iterable[int]) -> Iterator[int]:
        """Yield the ops that made the inputs of these, the latest first."""
        chosen = set(orders)
        producers = {tensor.producer for order in chosen for tensor in self.ops[order].inputs}
        yield from sorted((p for p in producers - chosen if p is not None and p in self.pieces), reverse=True)


def extract_ops(step: FailingStep, ops: Sequence[OpCall], target: OpCall, *, backward: bool) -> ExtractedOps:
    """Run the step once more, and keep the tensors of the op `target` of its trace `ops`, and of some before it.

    Raise NanDoctorError if the op took tensors that cannot be written as literals, such as sparse or complex ones.
    """
    by_order = {op.order: op for op in ops}
    ends = (op for tensor in target.inputs for op in ancestors(by_order, tensor, _MAX_DEPTH))
    wanted = {target.order, *sorted({op.order for op in ends if op.order < target.order})[-_MAX_OPS:]}
    pieces: dict[int, _RecordedOp] = {}
    refused: dict[int, NanDoctorError] = {}
    gradient = _Gradient() if backward else None

    def keep(order: int, call: Invocation, output: Any) -> None:
        if order not in wanted:
            return
        try:
            pieces[order] = _record(call, output)
        except NanDoctorError as error:  # raised here, it would be mistaken for the model's own
            refused[order] = error
        if order == target.order and gradient is not None:
            _await_gradient(tree_tensors(output), gradient)

    step.run(watch=Watch(stage="repro", ops=True, backward=backward, on_op=keep))
    if target.order in refused:
        raise refused[target.order]
    if target.order not in pieces or (gradient is not None and gradient.values is None):
        raise NanDoctorError(f"{target.op} was not seen again in a second run.", remedy=NOT_THE_SAME)
    low = torch_dtype(step.low)
    return ExtractedOps(target=target.order, pieces=pieces, ops=by_order, low=low, gradient=gradient)


def _record(call: Invocation, output: Any) -> _RecordedOp:
    taken = tree_tensors((call.args, call.kwargs))
    # Only a detached copy is left of a tensor that the op writes to.
    writes = schema_of(call.op).is_mutable
    trained = (leaf for leaf in taken if leaf.is_floating_point() and (leaf.requires_grad or writes))
    return _RecordedOp(
        call=call,
        taken={id(leaf): _copy(leaf) for leaf in taken},
        trained=frozenset(map(id, trained)),
        given=tuple(map(_copy, tree_tensors(output))),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "complex": tensor.is_complex()}
    kinds |= {"sparse": tensor.layout != torch.strided, "torch.func's": is_wrapped(tensor)}
    for kind in (kind for kind, is_kind in kinds.items() if is_kind):
        raise NanDoctorError(
            f"The op took or gave a tensor that is {kind}, which cannot be written as a literal.",
            remedy="`nandoctor replay -o report.json` saves what is known about it.",
        )
    return tensor.detach().resolve_neg().to("cpu", copy=True)


def _await_gradient(given: Sequence[torch.Tensor], gradient: _Gradient) -> None:
    def on_gradient(item: int, values: torch.Tensor) -> None:
        if gradient.values is None:
            gradient.item, gradient.values = item, values.detach().cpu().clone()

    for item, tensor in enumerate(given):
        if tensor.requires_grad:
            tensor.register_hook(partial(on_gradient, item))  # type: ignore[no-untyped-call]


class _Assembly:
    """A builder that links pieces into a `Program`: where each op's inputs come from, and their names."""

    def __init__(self, extracted: ExtractedOps, orders: Sequence[int]) -> None:
        self._extracted, self._orders = extracted, orders
        self._results: dict[str, tuple[torch.Tensor, ...]] = {}
        self._leaves: dict[str, torch.Tensor] = {}
        self._trained: dict[str, None] = {}

    def program(self) -> Program:
        """Return the program; the last op's result, or its gradients, are checked."""
        nodes = tuple(self._node(order) for order in self._orders)
        last, gradient = self._extracted.pieces[self._orders[-1]], self._extracted.gradient
        name = None
        if gradient is not None and gradient.values is not None:
            name = self._free_name("grad")
            self._leaves[name] = gradient.values
        nonfinite = (i for i, made in enumerate(last.given) if made.is_floating_point() and kinds_of((made,)))
        item = gradient.item if gradient is not None else next(nonfinite, 0)
        return Program(
            nodes=nodes,
            result=Ref(name=nodes[-1].name, item=item if len(last.given) > 1 else None),
            leaves=dict(self._leaves),
            low=self._extracted.low,
            gradient=name,
            trained=tuple(self._trained) if gradient is not None else (),
        )

    def _node(self, order: int) -> Node:
        piece = self._extracted.pieces[order]
        call = piece.call
        names = [argument.name for argument in schema_of(call.op).arguments]
        args = tuple(self._argument(name, value, piece) for name, value in zip(names, call.args, strict=False))
        kwargs = {name: self._argument(name, value, piece) for name, value in call.kwargs.items()}
        name = self._free_name(f"{call.name.strip('_')}_{len(self._results) + 1}")
        function, mode = self._extracted.nodes.setdefault(order, _find_function_and_mode(piece, self._extracted.low))
        self._results[name] = piece.given
        return Node(name=name, function=function, mode=mode, args=args, kwargs=kwargs)

    def _argument(self, name: str, value: Any, piece: _RecordedOp) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(name, piece.taken[id(value)], is_trained=id(value) in piece.trained)
        if isinstance(value, (list, tuple)):
            return [self._argument(f"{name}[{i}]", item, piece) for i, item in enumerate(value)]
        return _on_cpu(value)

    def _tensor(self, name: str, values: torch.Tensor, *, is_trained: bool) -> Ref:
        """Return a reference to the result of an earlier node, or to the leaf, that has these values."""
        for node, given in self._results.items():
            item = next((item for item, made in enumerate(given) if _is_same(made, values)), None)
            if item is not None:
                return Ref(name=node, item=item if len(given) > 1 else None)
        leaf = next((leaf for leaf, known in self._leaves.items() if _is_same(known, values)), None)
        if leaf is None:
            leaf = self._free_name(_LEAF_NAMES.get(name, name))
            self._leaves[leaf] = values
        if is_trained:
            self._trained[leaf] = None
        return Ref(name=leaf)

    def _free_name(self, wanted: str) -> str:
        name, used = re.sub(r"\W", "_", wanted).strip("_"), {*self._leaves, *self._results}
        others = ["y", "z"] if name == "x" else []
        others += [f"{name}_{i}" for i in range(2, len(used) + 3)]
        return next(free for free in [name, *others] if free not in used)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


def _find_function_and_mode(piece: _RecordedOp, low: torch.dtype) -> tuple[str, Mode]:
    """Return the function and the mode that alone give the op's result in the run."""
    for mode in get_args(Mode):
        for function in _functions(piece.call):
            if _gives_the_same(piece, function, mode, low):
                return function, mode
    raise NanDoctorError(
        f"{piece.call.name} gives another result alone than in the step, so no script can show it.",
        remedy="It may draw random numbers, or be an op of another library: report it there with "
        "`nandoctor replay -o report.json`.",
    )


def _functions(call: Invocation) -> Iterator[str]:
    """Yield names of functions that may call the op, the most common first."""
    name, raw = call.name, schema_of(call.op).name.partition("::")[2]
    yield from (f"torch.{place}{name}" for place in ("", "nn.functional.", "special.", "linalg."))
    yield f"torch.linalg.{name.removeprefix('linalg_')}"
    yield f"{METHOD}{raw}"
    yield str(call.op).replace("aten.", "torch.ops.aten.", 1)


def _gives_the_same(piece: _RecordedOp, function: str, mode: Mode, low: torch.dtype) -> bool:
    def value_of(value: Any) -> Any:
        return piece.taken[id(value)] if isinstance(value, torch.Tensor) else _on_cpu(value)

    args, kwargs = tree_map(value_of, (piece.call.args, piece.call.kwargs))
    node = Node(name="", function=function, mode=mode, args=args, kwargs=kwargs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = tree_tensors(node.run({}, low, low))
    except Exception:  # an argument or a dtype that this function rejects
        return False
    pairs = zip(made, piece.given, strict=False)
    return len(made) == len(piece.given) and all(_agree(ours, theirs) for ours, theirs in pairs)


def _agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not torch.equal(torch.isfinite(ours), torch.isfinite(theirs)):
        return False
    return torch.allclose(ours.double(), theirs.double(), rtol=2e-2, atol=1e-4, equal_nan=True)
