"""Sorts the contents of a file into weights, arrays and plain values, and tells what their names usually mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

from nandoctor.dumps.recorded_format import Recorded, get, read_generator, read_recorded
from nandoctor.dumps.stored_tensor import (
    ONLY_TORCH,
    PickledArray,
    StoredTensor,
    TorchName,
    is_array,
    is_bytes,
    is_dense,
    is_tensor,
    why_unread,
)
from nandoctor.dumps.trees import AS_WRITTEN, KIND, MAX_NAME, Slot, name_tensors, too_large
from nandoctor.errors import DumpError
from nandoctor.evidence.dump_summary import Role
from nandoctor.text import brief, brief_list, brief_value, byte_size, dtype_name, shorten
from nandoctor.trees import BEYOND, MAX_DEPTH, PLAIN, walk

if TYPE_CHECKING:
    import torch


# Parts that DataParallel, torch.compile, FSDP and activation checkpointing add to the paths of modules that they wrap.
_WRAPPED_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Names under which scripts save weights, the likeliest first.
_STATE_NAMES = (
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module"),
    *("model_weights", "weights", "params", "sd", "ema"),
)
_AVERAGE_WORDS = ("ema", "average", "averaged", "swa", "teacher", "shadow")
_PARAMETER_NAMES = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "in_proj_weight"})
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})

_MAX_VALUES = 100_000
_MAX_STATES = 5_000  # each is compared with all names of the model
# An expanded tensor claims more elements than were saved; beyond this, counting them could take forever.
_MAX_CLAIM_PER_BYTE = 16
_CLAIM_FLOOR = 1 << 28

_NOTHING = object()


@dataclass(slots=True, kw_only=True)
class Contents:
    """The contents of a file of `nbytes` bytes, by dotted name; `left_out` names what no replay uses.

    Dense tensors are torch's only if `as_torch` is set. `tree` has plain values, and a `Slot` for each array, in the
    containers that they were saved in. `with_grad` names the arrays that required gradients. `idle` has the tensors and
    the NaN of what no replay takes, as an optimizer.
    """

    nbytes: int
    as_torch: bool
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    with_grad: set[str] = field(default_factory=set)
    scalars: dict[str, Any] = field(default_factory=dict)
    rng_states: list[torch.Tensor] = field(default_factory=list)
    moments: list[SecondMoment] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    tree: Any = None
    recorded: Recorded | None = None
    num_values: int = 0
    claimed_nbytes: int = 0


def sort_contents(saved: object, nbytes: int, *, as_torch: bool) -> Contents:
    """Sort the saved object; a list such as [state, image, logit] is taken as a dict with its indices as keys.

    Raises DumpError if it is not a dict, list or module, is nested too deeply, or has invalid names or tensors.
    """
    if isinstance(saved, list | tuple) and any(is_array(item) or isinstance(item, Mapping) for item in saved):
        saved = dict(enumerate(saved))
    if not isinstance(saved, Mapping):
        raise DumpError(
            f"it holds {_describe(saved)}, not a dict.",
            remedy='Save torch.save({"state_dict": model.state_dict(), "image": image, "logit": logit}, path).',
        )
    contents = Contents(nbytes=nbytes, as_torch=as_torch)
    # The items of one flat dict with dotted names, as torch gives them, are its weights.
    tensors = (key for key, item in saved.items() if is_array(item) or is_extra_state(key))
    dotted = {key: saved[key] for key in tensors if isinstance(key, str) and "." in key}
    maps = [("", saved), *((str(key), item) for key, item in saved.items() if isinstance(item, Mapping))]
    is_flat = any(key.rpartition(".")[2] in _PARAMETER_NAMES for key in dotted)
    if is_flat and not any(_is_module(item) or _is_state(name, item) for name, item in maps):
        contents.states[""] = _take_state(contents, "", dotted)
        saved = {key: item for key, item in saved.items() if key not in dotted}
    contents.tree = _sort(contents, "", saved, depth=0)
    return contents


def sort_recorded(saved: Mapping[str, Any], nbytes: int, *, as_torch: bool) -> Contents:
    """Sort the contents of a recorder's file: nothing is guessed, and DumpError is raised for what does not fit."""
    contents = Contents(nbytes=nbytes, as_torch=as_torch)
    contents.left_out += [brief(text, 200) for text in get(saved, "left_out", list, []) if isinstance(text, str)]
    # Weights that did not fit into the file are named in `left_out`.
    state = get(saved, "state_dict", Mapping[str, Any], {})
    if "state_dict" not in saved and not any(text.startswith("state_dict") for text in contents.left_out):
        raise DumpError("it has no state dict.", remedy=AS_WRITTEN)
    contents.states["state_dict"] = _take_state(contents, "state_dict", state)
    take = partial(_take_unique, contents, {})
    contents.recorded = recorded = read_recorded(saved, take, partial(_take_tensor, contents))
    contents.with_grad.update(name for call in recorded.calls for name in call.with_grad)
    contents.rng_states += recorded.rng.torch_states if recorded.rng is not None else ()
    name_tensors(saved.get("output"), "output", take)
    for part, prefix in (("event", ""), ("scaler", "scaler")):
        for name, value in get(saved, part, Mapping[str, Any], {}).items():
            if value is not None:
                _sort(contents, _join(prefix, _check_name(name)), value, depth=1)
    if recorded.updater is not None:
        _take_moments(contents, "updater", recorded.updater.state, recorded.updater.groups)
    return contents


def _take_unique(contents: Contents, names: dict[tuple[Any, ...], str], name: str, value: Any) -> str:
    """Keep the array of a recorder's file, and return its name in `names`, which has those kept so far by place."""
    if not is_array(value):
        found = _describe(value)
        raise DumpError(f"{brief(name)!r} is {found}, which is neither a tensor nor plain data.", remedy=AS_WRITTEN)
    tensor = _take_tensor(contents, _check_name(name), value)
    is_plain = isinstance(value, StoredTensor) and value.numel() > 0
    # Data with two names, such as an input taken from the batch, is kept once, under the first.
    place = (value.address, value.shape, value.raw.strides, value.dtype) if is_plain else (name,)
    first = names.setdefault(place, name)
    contents.arrays.setdefault(first, tensor)
    return first


def choose_state(states: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """Return the name of the state dict to replay: by the usual names, and the model's own rather than an average."""

    def rank(name: str) -> tuple[bool, int, int]:
        parts = name.split(".")
        usual = _STATE_NAMES.index(parts[-1]) if parts[-1] in _STATE_NAMES else len(_STATE_NAMES)
        return any(part in _AVERAGE_WORDS for part in parts), usual, -len(states[name])

    return min(states, key=rank)


def unwrapped_name(name: str) -> str:
    """Return the path that a tensor or module has if no part of its model is wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED_PARTS)


def _sort(contents: Contents, name: str, value: object, depth: int) -> Any:
    """Sort a value and all that it holds; return its part of the tree, or `_NOTHING` if it is not part of a batch."""
    contents.num_values += 1
    if depth > MAX_DEPTH or contents.num_values > _MAX_VALUES:
        raise too_large()
    if isinstance(value, Mapping) and value.keys() >= _OPTIMIZER_KEYS:
        if not _take_moments(contents, name, value["state"], value["param_groups"]):
            contents.left_out.append(name or "an optimizer's state")
        _keep_idle(contents, name, value)
    elif is_random_state(name) and isinstance(value, Mapping):  # {"torch": ..., "cuda": ...}
        _sort_items(contents, name, value, depth)
    elif is_random_state(name) and is_bytes(value):
        contents.rng_states.append(read_generator(partial(_take_tensor, contents), value, name))
    elif is_bookkeeping(name):
        contents.left_out.append(name)
        _keep_idle(contents, name, value)
    elif _is_module(value):
        if state := _state_of(value):  # most losses have none
            contents.states[name] = _take_state(contents, name, state)
    elif isinstance(value, Mapping) and _is_state(name, value):
        contents.states[name] = _take_state(contents, name, value)
    elif isinstance(value, Mapping):
        return _sort_items(contents, name, value, depth)
    elif isinstance(value, (list, tuple, set, frozenset)) and not all(isinstance(item, PLAIN) for item in value):
        items = [_sort(contents, _join(name, str(index)), item, depth + 1) for index, item in enumerate(value)]
        kept = [None if item is _NOTHING else item for item in items]
        return tuple(kept) if isinstance(value, tuple) else kept
    else:
        return _sort_leaf(contents, name, value)
    return _NOTHING


def _sort_items(contents: Contents, name: str, mapping: Mapping[Any, object], depth: int) -> dict[Any, Any]:
    """Sort the items of a dict; return those that are part of a batch."""
    tree: dict[Any, Any] = {}
    if [*mapping] == [KIND]:  # an object without values, as a path or a function is
        contents.left_out.append(f"{name or 'the dump'} ({brief_value(mapping[KIND])})")
    for key, item in mapping.items():
        if key == KIND and isinstance(item, str):  # the class that the mapping stands for, not a value
            tree[key] = item
        elif isinstance(key, PLAIN):
            part = _check_name(key if isinstance(key, str) else str(key))
            tree[key] = _sort(contents, _join(name, part), item, depth + 1)
        else:
            contents.left_out.append(f"{name or 'the dump'} (a value whose key is {_describe(key)})")
    return {key: item for key, item in tree.items() if item is not _NOTHING}


def _is_module(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True for the attributes of an `nn.Module`, as they are pickled."""
    return isinstance(value, Mapping) and all(isinstance(value.get(part), Mapping) for part in _MODULE_PARTS)


def _state_of(module: Mapping[str, Any]) -> dict[str, object]:
    """Return what the module's `state_dict()` would, without running its code: an overridden one is not known."""

    def children(item: Mapping[str, Any]) -> dict[str, object]:
        return {str(name): child for name, child in item["_modules"].items() if _is_module(child)}

    state: dict[str, object] = {}
    for place, item in walk(module, children):
        if item is BEYOND or len(state) > _MAX_VALUES:
            raise too_large()
        dropped = item.get("_non_persistent_buffers_set")
        left_out = dropped if isinstance(dropped, set | frozenset) else frozenset()
        for name, value in (*item["_parameters"].items(), *item["_buffers"].items()):
            if value is not None and name not in left_out:
                state[_check_name(".".join([*place, str(name)]))] = value
    return state


def _is_state(name: str, mapping: Mapping[Any, object]) -> bool:
    """Return True if this maps parameter names to tensors, by its own name, else by the names in it."""
    others = [key for key, item in mapping.items() if not is_array(item) and not is_extra_state(key)]
    if name in _STATE_NAMES[:2] and 0 < len(others) < len(mapping):
        texts = [f"{key if isinstance(key, str) else _describe(key)} ({_describe(mapping[key])})" for key in others]
        raise DumpError(
            f"{name!r} holds values that are not tensors: {brief_list(texts)}.",
            remedy="Save what model.state_dict() returns, and other values beside it; of sharded weights "
            "the whole ones: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).",
        )
    if others:
        return False
    if name.rpartition(".")[2] in _STATE_NAMES:
        return True
    parameters = [key for key in mapping if isinstance(key, str) and ("." in key or key in _PARAMETER_NAMES)]
    in_batches = not name and any(key in names for key in mapping for names in _ROLE_NAMES.values())
    return 2 * len(parameters) > len(mapping) and not in_batches


def _take_state(contents: Contents, name: str, mapping: Mapping[Any, object]) -> dict[str, torch.Tensor]:
    if len(contents.states) >= _MAX_STATES:
        raise too_large()
    state = {}
    for key, item in mapping.items():
        parameter = _check_name(key)
        if is_array(item):
            state[parameter] = _take_tensor(contents, parameter, item)
        else:
            contents.left_out.append(_join(name, parameter))
    return state


def _take_moments(contents: Contents, name: str, state: object, groups: object) -> bool:
    """Keep the second moments of the first adaptive optimizer; a second one trains another model."""
    found = () if contents.moments else read_second_moments(state, groups)
    for moment in found:
        place = f"{name}.state.{moment.index}"
        contents.moments.append(replace(moment, values=_take_tensor(contents, place, moment.values)))
    return bool(found)


def _keep_idle(contents: Contents, name: str, value: object) -> None:
    """Keep tensors, NaN and infinite rates of what no replay uses, as of an optimizer: they may be all to say."""
    for place, item in walk(value):
        is_number = isinstance(item, float) and not math.isfinite(item)
        if is_dense(item) or (is_number and (math.isnan(item) or place[-1:] == ("lr",))):
            part = brief(".".join(shorten(str(key), 120) for key in (*filter(None, [name]), *place)))
            tensor = _take_tensor(contents, part, item) if is_dense(item) else None
            contents.idle[part] = item if tensor is None else tensor if tensor.shape else tensor.item()


def _sort_leaf(contents: Contents, name: str, value: object) -> Any:
    if name in contents.arrays or name in contents.scalars:
        raise DumpError(f"two values in it are called {name!r}.", remedy="Give each its own name.")
    if is_array(value):
        tensor = _take_tensor(contents, name, value)
        if tensor.shape or str(tensor.layout) != "torch.strided":
            contents.arrays[name] = tensor
            if isinstance(value, StoredTensor) and value.requires_grad:
                contents.with_grad.add(name)
            return Slot(name=name)
        contents.scalars[name] = tensor.item()
        return tensor
    if isinstance(value, PLAIN):
        contents.scalars[name] = value
    elif isinstance(value, (list, tuple, set, frozenset)):
        contents.scalars[name] = list(value)
    elif isinstance(value, TorchName):
        contents.scalars[name] = str(value)
    else:
        contents.left_out.append(f"{name} ({_describe(value)})")
        return _NOTHING
    return contents.scalars[name]


def _take_tensor(contents: Contents, name: str, value: Any) -> Any:
    """Return the tensor, or the array as one, if it is read and claims no more than the file may hold."""
    if is_tensor(value) and (kind := why_unread(value)):
        raise DumpError(
            f"{name!r} is {kind}, which is not read.",
            remedy="Save dense tensors in the format that the model computes in (tensor.dequantize(), "
            "tensor.to_padded_tensor(0.0), tensor.resolve_conj()), and weights after they were loaded.",
        )
    tensor: Any = value if is_tensor(value) else value.to_tensor()
    contents.claimed_nbytes += tensor.nbytes
    if contents.claimed_nbytes > max(_CLAIM_FLOOR, _MAX_CLAIM_PER_BYTE * contents.nbytes):
        raise DumpError(
            f"its tensors claim {byte_size(contents.claimed_nbytes)}, up to {name!r}, but the file has "
            f"{byte_size(contents.nbytes)}.",
            remedy="Save expanded tensors with .contiguous(); do not open the file if you do not know who wrote it.",
        )
    if isinstance(tensor, StoredTensor) and not (contents.as_torch or tensor.dtype.name in ONLY_TORCH):
        return tensor
    from nandoctor.dumps.tensors import to_torch  # noqa: PLC0415 (`inspect` imports no torch)

    try:
        return to_torch(tensor)
    except (RuntimeError, TypeError, ValueError) as error:  # of torch, for the parts of a sparse tensor
        raise DumpError(
            f"{name!r} cannot be rebuilt ({brief(str(error))}).", remedy="If it is damaged, copy the file again."
        ) from error


def _join(name: str, part: str) -> str:
    """Return the name of a part: like a key it is bounded, so that not all parts of a long one repeat it."""
    return _check_name(f"{name}.{part}") if name else part


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise DumpError(
            f"a name in it is {_describe(name)}, not a string.", remedy="Save dicts whose keys are strings."
        )
    if len(name) > MAX_NAME or not name.isprintable():
        raise DumpError(
            f"a name in it is too long or holds control characters: '{brief(name)}'.",
            remedy="Do not open the file if you do not know who wrote it.",
        )
    return name


def _describe(value: object) -> str:
    if isinstance(value, PickledArray):
        return f"an array of {brief(str(value.code))}"
    if is_tensor(value):
        return "one tensor"
    kind = brief(getattr(value, "kind", "") or type(value).__name__)
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


_ROLE_NAMES: dict[Role, frozenset[str]] = {
    "input": frozenset(
        """image images img imgs input inputs x pixels pixel_values input_ids input_values input_features inputs_embeds
        token_ids tokens token_type_ids position_ids attention_mask key_padding_mask padding_mask input_mask src
        decoder_input_ids decoder_attention_mask audio waveform spectrogram video frames text data samples features
        noisy latents timesteps points""".split()
    ),
    "target": frozenset(
        """target targets label labels y y_true mask masks gt ground_truth truth annotation annotations
        segmentation""".split()
    ),
    "output": frozenset(
        """output outputs out logit logits pred preds predicted prediction predictions y_hat y_pred prob probs
        probabilities score scores last_hidden_state""".split()
    ),
}
"""By role, the commonest first: in a compound name ("pred_boxes", "mask_logits") the rarer one decides."""

_BOOKKEEPING = frozenset("optim optimizer optimizers sched scheduler schedulers callbacks loops rng".split())


def role_of(name: str) -> Role:
    """Return the usual role of an array with this name; the outermost known part of a dotted name decides."""
    parts = _parts(name)
    by_part = (role for part in parts for role, names in _ROLE_NAMES.items() if part in names)
    words = {word for part in parts for word in part.split("_") if len(word) > 1}  # single letters are ignored
    by_word = (role for role in reversed(_ROLE_NAMES) if words & _ROLE_NAMES[role])
    return next(chain(by_part, by_word), "unknown")


def is_loss(name: str) -> bool:
    """Return True for the name of a loss: "loss", "train_loss", "losses.total", but not "loss_scale"."""
    words = set(re.split(r"[\W_]+", name.lower()))
    return bool(words & {"loss", "losses"}) and not words & {"scale", "scaler", "weight", "best", "min"}


def is_extra_state(name: object) -> bool:
    """Return True for the key under which nn.Module.state_dict stores the result of get_extra_state."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def is_bookkeeping(name: str) -> bool:
    """Return True for the state of an optimizer, scheduler, random generator or trainer: not part of a batch."""
    return any(_BOOKKEEPING.intersection(part.split("_")) for part in _parts(name))


def is_random_state(name: str) -> bool:
    """Return True for the saved state of a random generator."""
    return any("rng" in part.split("_") for part in _parts(name))


def _parts(name: str) -> list[str]:
    """Return the dotted parts in snake_case, without numbering: "inputImage.0" gives ["input_image"]."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    parts = (part.replace("-", "_").rstrip("_0123456789") for part in snake.split("."))
    return [part for part in parts if part]


_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Their names in torch.optim: in the amsgrad variants; in Adam, AdamW, NAdam and RAdam; in RMSprop; in Adagrad. The root
# is taken of the first one that is there.
_MOMENT_NAMES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment:
    """The running mean of the squared gradients of one parameter.

    `index` counts the optimizer's parameters from 0; `name` is the parameter's if the optimizer was given names, else
    "". `eps` is what the optimizer adds to the root, in the format of `values`. `decay` is the mean's, 0 for a sum.
    """

    index: int = 0
    name: str
    eps: float
    values: torch.Tensor
    decay: float = 0.0


def read_second_moments(state: object, groups: object) -> tuple[SecondMoment, ...]:
    """Return the second moments in an optimizer's state, in its order; malformed entries are skipped.

    State and groups name the parameters by their numbers, as a state dict does, or by their names. torch lets a
    parameter be in one group only, so further mentions of it are skipped too. Fused optimizers are left out: their
    kernels keep root and eps in fp32, whatever the format of the weights.
    """
    first: dict[int | str, SecondMoment] = {}
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return ()
    for group in groups:
        fields = group if isinstance(group, Mapping) else {}
        eps, keys, names = fields.get("eps"), fields.get("params"), fields.get("param_names")
        if not isinstance(eps, float) or not isinstance(keys, list) or fields.get("fused") is True:
            continue
        betas = fields.get("betas")  # of Adam; RMSprop has an alpha, and Adagrad sums without decay
        decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else fields.get("alpha")
        for position, key in enumerate(keys):
            slots = state.get(key) if isinstance(key, (int, str)) and key not in first else None
            held = slots if isinstance(slots, Mapping) else {}
            values = next((held[name] for name in _MOMENT_NAMES if is_tensor(held.get(name))), None)
            if is_dense(values) and dtype_name(values.dtype) in _DTYPES:
                name = names[position] if isinstance(names, list) and position < len(names) else key
                first[key] = SecondMoment(
                    index=key if isinstance(key, int) else len(first),
                    name=name if isinstance(name, str) else "",
                    eps=eps,
                    values=values,
                    decay=decay if isinstance(decay, float) and 0 <= decay < 1 else 0.0,
                )
    return tuple(first.values())
