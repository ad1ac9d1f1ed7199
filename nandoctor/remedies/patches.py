"""What a person would write to make an edit: a title, and lines to paste.

In: an `Edit` whose places carry the source lines that the trace saw. Out: text.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    KeepModule,
    KeepOp,
    KeepSamples,
    OpSite,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    SetAttribute,
    SetLossScale,
    SetOptimizerEps,
    StableLog,
    Together,
    UnmaskRows,
    UseFormat,
)
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.rounding import LARGEST_EPS
from nandoctor.evidence.trace import LOSS, SourceLine
from nandoctor.remedies.staging import NAMESPACES, find_statement, find_words, parse, root, stage

_OFF = 'with torch.autocast("cuda", enabled=False):'
_FEW = 2
_SMALL, _LARGE = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a patch has to know of the model, asked for by a module's path.

    `own_lines` are the source lines of a module's own ops, as far as they are known; `is_called_by_torch` tells whether
    the forward that calls it is torch's, where nothing can be pasted; `is_low` whether its weights are half precision.
    """

    own_lines: Callable[[str], Sequence[SourceLine]] = lambda _: ()
    is_called_by_torch: Callable[[str], bool] = lambda path: path.rpartition(".")[2].isdigit()
    is_low: Callable[[str], bool] = lambda _: False


_BINARY = frozenset({"add", "sub", "mul", "div"})
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("add",),
    ast.Div: ("div", "true_divide"),
    ast.Mult: ("mul",),
    ast.Pow: ("pow",),
    ast.Sub: ("sub",),
}


def write_title(edit: Edit) -> str:
    """The edit as one short sentence."""
    if isinstance(edit, Together):
        if all(isinstance(single, KeepModule) for single in edit.edits):
            return f"Keep {len(edit.edits)} modules in fp32: {', '.join(map(_module_name, edit.edits))}"
        return "; ".join(write_title(single) for single in edit.edits)
    return str(_WRITERS[edit.kind][0](edit))


def write_patch(edit: Edit, around: Surroundings | None = None) -> str:
    """The lines to write, with file and line where they are known."""
    around = around or Surroundings()
    if isinstance(edit, KeepModule):
        return "\n".join(_patch_module(edit, around))
    if isinstance(edit, Together):
        wholes = [single for single in edit.edits if isinstance(single, KeepModule) and single.children]
        if len(wholes) > _FEW and not any(single.module == LOSS for single in wholes):
            rest = [write_patch(single, around) for single in edit.edits if single not in wholes]
            return "\n\n".join(["\n".join(_patch_from_outside(wholes, around)), *rest])
        return "\n\n".join(write_patch(single, around) for single in edit.edits)
    return "\n".join(_WRITERS[edit.kind][1](edit))


def _module_name(edit: Any) -> str:
    name = edit.module or "the whole model"
    return name if edit.children else f"the own ops of {edit.module or 'the model'}"


def _title_module(edit: KeepModule) -> str:
    return "Compute the loss in fp32" if edit.module == LOSS else f"Keep {_module_name(edit)} in fp32"


def _patch_module(edit: KeepModule, around: Surroundings) -> Iterator[str]:
    if not edit.children:
        yield from _patch_own_ops(edit, around.own_lines(edit.module))
        return
    if edit.module == LOSS:
        yield "# where the loss is computed:"
        yield _OFF
        yield "    loss = loss_fn(output.float(), target)"
        return
    if around.is_called_by_torch(edit.module):
        yield from _patch_from_outside([edit], around)
        return
    parent, _, name = edit.module.rpartition(".")
    if around.is_low(edit.module):
        yield "# once, where the model is made: its weights are half precision"
        yield f"{f'model.{edit.module}' if name else 'model'}.float()"
    yield f"# in the forward of {parent or 'the model'}, where it calls {name}:" if name else "# where it is called:"
    yield _OFF
    own = f"self.{name}" if name.isidentifier() else f"getattr(self, {name!r})"
    yield f"    y = {own if name else 'model'}(x.float())"


def _patch_own_ops(edit: KeepModule, lines: Sequence[SourceLine]) -> Iterator[str]:
    yield f"# in the forward of {edit.module or 'the model'}: its own ops in fp32, submodules called outside of it"
    yield _OFF
    for line in lines:
        yield f"    # {_file_name(line.file)}:{line.line}: {line.text}"
    yield "    ...  # every tensor that goes in, and what submodules return, as x.float()"


def _patch_from_outside(edits: Sequence[KeepModule], around: Surroundings) -> Iterator[str]:
    yield "# once, where the model is made:"
    yield f"for name in {_listed(edit.module for edit in edits)}:"
    yield "    module = model.get_submodule(name)"
    yield '    module.forward = torch.autocast("cuda", enabled=False)(module.forward)'
    yield "    module.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))"
    if any(around.is_low(edit.module) for edit in edits):
        yield "    module.float()  # its weights are half precision"


def _listed(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _title_op(edit: KeepOp) -> str:
    where = _place(edit.site) or f"{edit.site.op} in {edit.site.module or 'the model'}"
    return f"Compute {where} in fp32"


def _patch_op(edit: KeepOp) -> Iterator[str]:
    source = edit.site.source
    text = find_statement(source) if source else ""
    steps = stage(text, taken=find_words(source) if source else ())
    yield _heading(edit.site)
    if not steps:
        yield _OFF
        yield f"    {text or '...'}  # with every tensor that goes in as x.float(), submodules called outside of it"
    for step in steps:
        if step.computes:
            yield _OFF
            if step.tensors:
                yield f"    {', '.join(step.tensors)} = {', '.join(f'{name}.float()' for name in step.tensors)}"
            yield f"    {step.text}"
        else:
            yield f"{step.text}  # as it was, outside"


def _title_attribute(edit: SetAttribute) -> str:
    return f"Set {edit.name} of {edit.type} to {_written(edit.value)} (was {_written(edit.was)})"


def _patch_attribute(edit: SetAttribute) -> Iterator[str]:
    yield f"# where {edit.type} is made, or once before training:"
    yield "for module in model.modules():"
    yield f"    if isinstance(module, {edit.type}):"
    yield f"        module.{edit.name} = {_written(edit.value)}  # was {_written(edit.was)}"


def _title_argument(edit: SetArgument) -> str:
    new = "the lowest number of its format" if edit.value is None else _written(edit.value)
    what = "an eps of " if edit.value is not None and 0 < edit.was <= LARGEST_EPS else ""
    return f"Use {what}{new} instead of {_written(edit.was)}{_where(edit.site)}"


def _where(site: OpSite) -> str:
    return f" in {_place(site)}" if site.source else f" in {site.op}"


def _where_if_known(site: OpSite) -> str:
    return _where(site) if site.source else ""


def _written(value: float) -> str:
    """A number as people write it in code: 1e-8 and not 1e-08, 1e-4 and not 0.0001."""
    if 0 < abs(value) < _SMALL or _LARGE <= abs(value) < math.inf:
        digits, _, exponent = f"{value:.5e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:g}"


def _patch_argument(edit: SetArgument) -> Iterator[str]:
    def replace_constant(node: ast.AST, text: str) -> str | None:
        if not _is_constant(node, edit.was):
            return None
        if edit.value is not None:
            return _written(edit.value)
        return f"torch.finfo({_scores_of(parse(text), text, node)}.dtype).min"

    new = "torch.finfo(x.dtype).min" if edit.value is None else _written(edit.value)
    name = _name_of_number(edit)
    in_words = f"{name} = {new} where it is set" if name else f"{new} here"
    yield from _changed_line(edit.site, replace_constant, f"{in_words}; it is {_written(edit.was)} now")


def _name_of_number(edit: SetArgument) -> str | None:
    """The name by which the line knows the number: `eps` of `x / (std + eps)`; None where it may be several."""
    tree = parse(_text(edit.site))
    targets = [_operand(node, edit.site.op, edit.argument) for node in ast.walk(tree)] if tree else []
    found = [target for target in targets if target is not None]
    is_name = len(found) == 1 and isinstance(found[0], (ast.Name, ast.Attribute))
    return ast.unparse(found[0]) if is_name else None


def _title_clamp(edit: ClampArgument) -> str:
    return f"{_clamp_in_words(edit)}{_where_if_known(edit.site)}"


def _clamp_in_words(edit: ClampArgument) -> str:
    what = _argument_in_words(edit)
    if edit.nan:
        return f"Take 0 where {edit.site.op} has no value"
    return f"Clamp {what} of {edit.site.op} to {_bounds_in_words(edit)}"


def _argument_in_words(edit: ClampArgument) -> str:
    if edit.argument == "other":
        return "the divisor" if edit.site.op in ("div", "true_divide") else "the second argument"
    if edit.argument in ("", "self", "input"):
        return "the first argument" if edit.site.op in _BINARY else "the argument"
    return edit.argument


def _bounds_in_words(edit: ClampArgument) -> str:
    low, high = edit.low, edit.high
    if low is not None and high is not None:
        return f"{_written(low)} to {_written(high)}"
    return f"at least {_written(low)}" if low is not None else f"at most {high:g}"


def _patch_clamp(edit: ClampArgument) -> Iterator[str]:
    bounds = ", ".join(
        f"{name}={_written(value)}" for name, value in (("min", edit.low), ("max", edit.high)) if value is not None
    )
    call = "nan_to_num(0.0)" if edit.nan else f"clamp({bounds})"

    def wrap(node: ast.AST, text: str) -> str | None:
        target = _operand(node, edit.site.op, edit.argument)
        if target is None or not isinstance(node, ast.expr):
            return None
        before, inner, after = _cut(text, target)
        if not isinstance(target, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            grouped = isinstance(node, ast.BinOp) and before.endswith("(") and after.startswith(")")
            before, after = (before[:-1], after[1:]) if grouped else (before, after)
            inner = f"({inner})"
        return _within(text, node, f"{before}{inner}.{call}{after}")

    yield from _changed_line(edit.site, wrap, f"{_clamp_in_words(edit)}: .{call}")


def _title_scale(edit: ScaleFirst) -> str:
    where = _where_if_known(edit.product)
    return f"Scale by {edit.factor:.4g} before {edit.product.op}{where} instead of after it"


def _patch_scale(edit: ScaleFirst) -> Iterator[str]:
    yield f"{_heading(edit.product)}: multiply the first tensor, as in (q * {edit.factor:.6g}) @ k.transpose(-2, -1)"
    yield from _quoted(edit.product)
    yield f"{_heading(edit.scale)}: and leave this {edit.scale.op} out"
    if edit.scale.source != edit.product.source:
        yield from _quoted(edit.scale)


def _patch_unmask(edit: UnmaskRows) -> Iterator[str]:
    if edit.site.type == "MultiheadAttention":
        yield f"{_heading(edit.site).partition(', in ')[0]}, where the {edit.site.type} is called"
        yield from _quoted(edit.site)
        yield "empty = mask.all(-1, keepdim=True)  # rows in which every key is masked (mask: True where it is hidden)"
        yield "# mask & ~empty in place of the mask; what these rows give means nothing: leave it out of the loss"
        return
    yield _heading(edit.site)
    yield from _quoted(edit.site)
    if edit.site.op == "scaled_dot_product_attention":
        yield "empty = ~mask.any(-1, keepdim=True)  # rows in which every key is masked (mask: True where it is seen)"
        yield "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | empty).masked_fill(empty, 0.0)"
        return
    yield "empty = torch.isneginf(scores).all(-1, keepdim=True)  # rows in which every key is masked"
    yield "weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)"


def _title_log(edit: StableLog) -> str:
    return f"Take the logarithm and the {edit.inner.op} in one function, {_stable_name(edit)}"


def _patch_log(edit: StableLog) -> Iterator[str]:
    taken = "logits, dim=-1" if edit.inner.op == "softmax" else "-logits" if edit.complement else "logits"
    if edit.inner.source != edit.log.source:
        yield f"{_heading(edit.inner)}: keep what goes in here"
        yield from _quoted(edit.inner)
    yield f"{_heading(edit.log)}: and take its logarithm from that"
    yield from _quoted(edit.log)
    yield f"F.{_stable_name(edit)}({taken})"


def _stable_name(edit: StableLog) -> str:
    return "log_softmax" if edit.inner.op == "softmax" else "logsigmoid"


def _patch_format(edit: UseFormat) -> Iterator[str]:
    if edit.format is BF16:
        yield 'with torch.autocast("cuda", dtype=torch.bfloat16):  # a GradScaler is not needed with it'
    else:
        yield _OFF
    yield "    output = model(image)"


def _patch_loss_scale(edit: SetLossScale) -> Iterator[str]:
    yield f'scaler = torch.amp.GradScaler("cuda", init_scale={edit.value:g})'


def _title_buffers(edit: ResetBuffers) -> str:
    noun = "buffers" if len(edit.names) > 1 else "buffer"
    return f"Reset {len(edit.names)} {noun}: {', '.join(edit.names[:3])}{' ...' if len(edit.names) > 3 else ''}"


def _patch_buffers(edit: ResetBuffers) -> Iterator[str]:
    owners = sorted({name.rpartition(".")[0] for name in edit.names})
    yield f"for name in {_listed(owners)}:"
    yield "    model.get_submodule(name).reset_running_stats()"
    yield "# then a few batches in train mode, without an optimizer step, give the statistics back"


def _patch_samples(edit: KeepSamples) -> Iterator[str]:
    yield "good = torch.isfinite(image).flatten(1).all(1)"
    yield f"image, mask = image[good], mask[good]  # in this batch: samples {', '.join(map(str, edit.samples))}"


def _patch_optimizer(edit: SetOptimizerEps) -> Iterator[str]:
    yield "for group in optimizer.param_groups:"
    yield f'    group["eps"] = {_written(edit.value)}'


_WRITERS: dict[str, tuple[Callable[[Any], str], Callable[[Any], Iterator[str]]]] = {
    "keep-module": (_title_module, lambda edit: _patch_module(edit, Surroundings())),
    "keep-op": (_title_op, _patch_op),
    "set-attribute": (_title_attribute, _patch_attribute),
    "set-argument": (_title_argument, _patch_argument),
    "clamp": (_title_clamp, _patch_clamp),
    "scale-first": (_title_scale, _patch_scale),
    "unmask-rows": (lambda _: "Open the rows that are masked throughout, and take zeros for them", _patch_unmask),
    "stable-log": (_title_log, _patch_log),
    "use-format": (lambda edit: f"Run autocast in {edit.format.label}", _patch_format),
    "loss-scale": (lambda edit: f"Lower the loss scale to {edit.value:g}", _patch_loss_scale),
    "reset-buffers": (_title_buffers, _patch_buffers),
    "keep-samples": (lambda _: "Leave the guilty samples out of the batch", _patch_samples),
    "optimizer-eps": (lambda edit: f"Give the optimizer an eps of {_written(edit.value)}", _patch_optimizer),
}


def _place(site: OpSite) -> str:
    return f"line {site.source.line} of {_file_name(site.source.file)}" if site.source else ""


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _heading(site: OpSite) -> str:
    owner = "the loss" if site.module == LOSS else f"{site.type}.forward"
    where = f"{_file_name(site.source.file)}:{site.source.line}, in {owner}" if site.source else f"in {owner}"
    return f"# {where}"


def _text(site: OpSite) -> str:
    return site.source.text if site.source else ""


def _quoted(site: OpSite) -> Iterator[str]:
    if _text(site):
        yield f"#   {_text(site)}"


def _changed_line(site: OpSite, change: Callable[[ast.AST, str], str | None], otherwise: str) -> Iterator[str]:
    """The line before and after; where it cannot be rewritten, the line and what to do in words."""
    yield _heading(site)
    text = _text(site)
    tree = parse(text)
    for node in ast.walk(tree) if tree is not None else ():
        new = change(node, text) if isinstance(node, ast.expr) else None
        if new is not None and isinstance(node, ast.expr):
            before, _, after = _cut(text, node)
            yield f"- {text}"
            yield f"+ {before}{new}{after}"
            return
    yield from _quoted(site)
    yield f"# {otherwise}"


def _cut(text: str, node: ast.expr) -> tuple[str, str, str]:
    """A line before, at and after a node; ast counts its columns in bytes."""
    assert node.end_col_offset is not None
    line, start, end = text.encode(), node.col_offset, node.end_col_offset
    return line[:start].decode(), line[start:end].decode(), line[end:].decode()


def _within(text: str, node: ast.expr, changed: str) -> str:
    """The part of the `changed` line that stands where the node stood."""
    before, _, after = _cut(text, node)
    return changed.removeprefix(before).removesuffix(after)


def _is_constant(node: ast.AST, number: float) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_constant(node.operand, -number)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and float(node.value) == number


def _scores_of(tree: ast.AST | None, text: str, constant: ast.AST) -> str:
    """What the call fills that has the constant among its arguments: `scores` of `scores.masked_fill(mask, -1e9)`."""
    for node in ast.walk(tree) if tree is not None else ():
        takes = isinstance(node, ast.Call) and any(ast.dump(a) == ast.dump(constant) for a in node.args)
        if takes and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value if root(node.func) not in NAMESPACES else None
            return (ast.get_source_segment(text, owner) if owner is not None else None) or "x"
    return "x"


def _operand(node: ast.AST, op: str, argument: str) -> ast.expr | None:
    """The expression in `node` that is this argument of the op."""
    if isinstance(node, ast.BinOp) and op in _OPERATORS.get(type(node.op), ()):
        return node if not argument else node.right if argument in ("other", "exponent") else node.left
    if not isinstance(node, ast.Call):
        return None
    name = (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )
    if name != op:
        return None
    if not argument:
        return node
    given = list(node.args)
    if isinstance(node.func, ast.Attribute) and root(node.func) not in NAMESPACES - {"self"}:
        given.insert(0, node.func.value)
    place = 1 if argument in ("other", "exponent", "tensor2") else 0
    return given[place] if place < len(given) else None
