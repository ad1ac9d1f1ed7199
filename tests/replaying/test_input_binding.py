"""How arrays find their way into forwards of every signature, and what is said where there is no telling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from nandoctor.errors import ModelError
from nandoctor.replaying.input_binding import bind_inputs, find_bindings

IMAGE, MASK, DEPTH = torch.full((2, 3), 1.0), torch.full((2, 3), 2.0), torch.full((2, 3), 4.0)
TOKENS = torch.ones(2, 5, dtype=torch.long)


class Heard(dict):
    """What forward was given, by parameter."""


def model_of(forward):
    """A Module whose forward is `forward(self, ...)`."""
    return type("Model", (nn.Module,), {"forward": forward})()


def heard(model, available):
    """What forward hears under the likeliest binding."""
    tensors = [name for name, value in available.items() if isinstance(value, Tensor)]
    return find_bindings(model, available, tensors)[0].forward(model, available)


def one_tensor(self, x):
    return Heard(x=x)


def one_optional(self, x=None, verbose=False):
    return Heard(x=x)


def by_name(self, mask, image):
    return Heard(image=image, mask=mask)


def by_name_and_one_left(self, x, mask):
    return Heard(x=x, mask=mask)


def keyword_only(self, *, image, depth=None):
    return Heard(image=image, depth=depth)


def keyword_only_left(self, *, x):
    return Heard(x=x)


def positional_only(self, image, /, mask):
    return Heard(image=image, mask=mask)


def positional_only_left(self, x, /):
    return Heard(x=x)


def arguments(self, *tensors):
    return Heard(x=tensors[0], length=len(tensors))


def named_and_rest(self, image, *rest, **extra):
    return Heard(image=image, rest=rest, extra=extra)


def timestep(self, noisy, timestep, guidance=7.5):
    return Heard(noisy=noisy, timestep=timestep, guidance=guidance)


def transformers_like(
    self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs
):
    return Heard(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def dict_by_annotation(self, x: dict[str, Tensor]):
    return Heard(x)


def dict_by_mapping_annotation(self, x: Mapping[str, Tensor]):
    return Heard(x)


def dict_by_subscript(self, x):
    return Heard(x, image=x["image"])


def dict_by_get(self, x):
    return Heard(x, image=x.get("image"))


def dict_by_iteration(self, x):
    return Heard({name: value for name, value in x.items()})  # noqa: C416 - the loop is what is read


def dict_by_membership(self, x):
    return Heard(x, known="image" in x)


def dict_by_unpacking(self, x):
    return Heard(**x)


def dict_by_name(self, batch):
    return Heard(batch)


def prediction_annotation(self, x: PredictionInputs):  # noqa: F821 - only its text is read
    return Heard(x=x)


def test_a_list_of_the_name_of_args_is_passed_in_order():
    def forward(self, *inputs):
        return inputs

    arrays = {"inputs.0": IMAGE, "inputs.1": DEPTH, "mask": MASK}
    binding = find_bindings(model_of(forward), arrays, list(arrays), {"inputs": ["inputs.0", "inputs.1"]})[0]
    assert binding.description == "model(inputs.0, inputs.1)"
    assert [id(array) for array in binding.forward(model_of(forward), arrays)] == [id(IMAGE), id(DEPTH)]
    with pytest.raises(ModelError) as caught:
        find_bindings(model_of(forward), arrays, list(arrays), {"inputs": ["inputs.0", {"deep": 1}, 2]})
    assert "--inputs inputs.0,inputs.1)" in caught.value.remedy


@pytest.mark.parametrize(
    ("forward", "available", "expected"),
    [
        pytest.param(one_tensor, {"image": IMAGE}, {"x": IMAGE}, id="the only array"),
        pytest.param(one_tensor, {"image": IMAGE, "mask": MASK}, {"x": IMAGE}, id="the only one that is no target"),
        pytest.param(one_tensor, {"labels": MASK}, {"x": MASK}, id="the only one, whatever its name"),
        pytest.param(one_tensor, {"x": IMAGE, "depth": DEPTH}, {"x": IMAGE}, id="name before number"),
        pytest.param(one_tensor, {"image": IMAGE, "epoch": 3}, {"x": IMAGE}, id="plain values are no candidates"),
        pytest.param(one_optional, {"image": IMAGE}, {"x": IMAGE}, id="every parameter optional"),
        pytest.param(by_name, {"image": IMAGE, "mask": MASK}, {"image": IMAGE, "mask": MASK}, id="by name"),
        pytest.param(
            by_name, {"batch.image": IMAGE, "batch.mask": MASK}, {"image": IMAGE, "mask": MASK}, id="in a container"
        ),
        pytest.param(
            by_name_and_one_left, {"image": IMAGE, "mask": MASK}, {"x": IMAGE, "mask": MASK}, id="by name, one left"
        ),
        pytest.param(keyword_only, {"image": IMAGE}, {"image": IMAGE, "depth": None}, id="keyword-only"),
        pytest.param(keyword_only_left, {"image": IMAGE}, {"x": IMAGE}, id="keyword-only, one left"),
        pytest.param(
            positional_only, {"mask": MASK, "image": IMAGE}, {"image": IMAGE, "mask": MASK}, id="positional-only"
        ),
        pytest.param(positional_only_left, {"image": IMAGE}, {"x": IMAGE}, id="positional-only, one left"),
        pytest.param(arguments, {"image": IMAGE, "mask": MASK}, {"x": IMAGE, "length": 1}, id="*args"),
        pytest.param(
            named_and_rest, {"image": IMAGE, "mask": MASK}, {"image": IMAGE, "rest": (), "extra": {}}, id="*args left"
        ),
        pytest.param(
            timestep,
            {"noisy": IMAGE, "timestep": 7, "epoch": 1},
            {"noisy": IMAGE, "timestep": 7, "guidance": 7.5},
            id="a plain value as a parameter",
        ),
        pytest.param(
            transformers_like,
            {"input_ids": TOKENS, "attention_mask": MASK},
            {"input_ids": TOKENS, "attention_mask": MASK, "labels": None},
            id="many optional ones",
        ),
        pytest.param(
            transformers_like,
            {"token_ids": TOKENS},
            {"input_ids": TOKENS, "attention_mask": None, "labels": None},
            id="the first of many optional ones",
        ),
        pytest.param(prediction_annotation, {"image": IMAGE}, {"x": IMAGE}, id="an annotation with dict inside a word"),
    ],
)
def test_arrays_go_to_the_parameters_that_they_fit(forward, available, expected):
    assert heard(model_of(forward), available) == expected


DICT_FORWARDS = [
    dict_by_annotation,
    dict_by_mapping_annotation,
    dict_by_subscript,
    dict_by_get,
    dict_by_iteration,
    dict_by_membership,
    dict_by_unpacking,
    dict_by_name,
]


def detector(self, images, targets=None, cache=None):
    return Heard(images=images, targets=targets, cache=cache)


def test_an_optional_parameter_takes_the_list_of_its_name():
    boxes, rest = [{"boxes": MASK}], {"image": IMAGE}
    containers = {"targets": boxes, "cache": rest}
    arrays = {"images": IMAGE, "targets.0.boxes": MASK, "cache.image": IMAGE}
    binding = find_bindings(model_of(detector), arrays, list(arrays), containers)[0]
    assert binding.forward(model_of(detector), {**arrays, **containers}) == {
        "images": IMAGE,
        "targets": boxes,
        "cache": None,
    }


@pytest.mark.parametrize("forward", DICT_FORWARDS)
@pytest.mark.parametrize("available", [{"image": IMAGE}, {"image": IMAGE, "mask": MASK, "step": 3}], ids=["one", "all"])
def test_a_parameter_that_is_used_as_a_dict_takes_everything(forward, available):
    given = heard(model_of(forward), available)
    assert {name: given[name] for name in available} == available


def test_a_batch_that_was_saved_as_a_dict_is_that_dict_again():
    given = heard(model_of(dict_by_name), {"batch.image": IMAGE, "batch.mask": MASK, "epoch": 3, "batch.step": 4})
    assert given == {"image": IMAGE, "mask": MASK, "step": 4}


def test_a_dict_that_is_passed_on_is_the_second_choice():
    class PassesOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model_of(dict_by_subscript)

        def forward(self, inputs):
            return self.net(inputs)

    descriptions = [binding.description for binding in find_bindings(PassesOn(), {"image": IMAGE}, ["image"])]
    assert descriptions == ["model(inputs=image)", "model({image})"]


def test_a_dict_parameter_takes_a_tensor_as_second_choice():
    bindings = find_bindings(model_of(dict_by_name), {"image": IMAGE}, ["image"])
    assert [binding.description for binding in bindings] == ["model({image})", "model(batch=image)"]
    assert [binding.arrays for binding in bindings] == [("image",), ("image",)]


def wrapped_in_anything(inner):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = inner

        def forward(self, *args, **kwargs):
            return self.net(*args, **kwargs)

    return Wrapper()


WRAPPERS = [
    nn.DataParallel,
    lambda inner: torch.compile(inner, backend="eager"),
    torch.optim.swa_utils.AveragedModel,
    wrapped_in_anything,
    lambda inner: nn.DataParallel(nn.DataParallel(inner)),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["DataParallel", "compiled", "averaged", "own", "twice"])
def test_wrappers_are_looked_through(wrap):
    model = wrap(model_of(by_name))
    bindings = find_bindings(model, {"image": IMAGE, "mask": MASK, "extra": DEPTH}, ["image", "mask", "extra"])
    assert [binding.description for binding in bindings] == ["model(mask, image)"]


def test_a_model_with_a_child_called_module_keeps_its_signature():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model_of(by_name)

        def forward(self, picture):
            return Heard(picture=picture)

    assert heard(Holder(), {"image": IMAGE}) == {"picture": IMAGE}


class ScriptedByName(nn.Module):
    def forward(self, image: Tensor, depth: Tensor, scale: float = 2.0) -> Tensor:
        return image * scale + depth


class ScriptedDict(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["image"] + x["depth"]


class ScriptedOne(nn.Module):
    def forward(self, x):
        return x * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "available", "expected"),
    [
        (ScriptedByName, {"depth": DEPTH, "image": IMAGE}, 6.0),
        (ScriptedByName, {"depth": DEPTH, "image": IMAGE, "scale": 3.0}, 7.0),
        (ScriptedDict, {"depth": DEPTH, "image": IMAGE}, 5.0),
        (ScriptedOne, {"image": IMAGE}, 3.0),
    ],
)
def test_a_script_module_is_called_by_its_schema(module, available, expected):
    assert float(heard(torch.jit.script(module()), available)[0, 0]) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_is_called_by_its_schema():
    model = torch.jit.trace(ScriptedOne(), IMAGE)
    assert float(heard(model, {"image": IMAGE, "mask": MASK})[0, 0]) == 3.0


def two_unknown(self, left, right):
    return Heard()


def nothing(self):
    return Heard()


def only_keywords(self, **kwargs):
    return Heard()


@pytest.mark.parametrize(
    ("forward", "available", "wanted", "candidates"),
    [
        (one_tensor, {"image": IMAGE, "depth": DEPTH}, "x", ["image (2, 3) float32", "depth (2, 3) float32"]),
        (one_tensor, {"labels": MASK, "mask": MASK}, "x", ["labels (2, 3) float32", "mask (2, 3) float32"]),
        (two_unknown, {"image": IMAGE, "tokens": TOKENS}, "left, right", ["image (2, 3)", "tokens (2, 5) int64"]),
        (two_unknown, {"left": IMAGE}, "right", ["none"]),
        (by_name, {"a.image": IMAGE, "b.image": IMAGE, "mask": MASK}, "image", ["a.image", "b.image"]),
        (arguments, {"image": IMAGE, "depth": DEPTH}, "*tensors", ["image", "depth"]),
        (nothing, {"image": IMAGE}, "no array", ["image"]),
        (only_keywords, {"image": IMAGE}, "no array", ["image"]),
        (one_optional, {"image": IMAGE, "depth": DEPTH}, "x", ["image", "depth"]),
        (one_tensor, {}, "x", ["none"]),
    ],
)
def test_ambiguity_lists_what_is_wanted_and_what_there_is(forward, available, wanted, candidates):
    with pytest.raises(ModelError) as caught:
        heard(model_of(forward), available)
    first_line, *listed = caught.value.message.splitlines()
    assert f"how to call Model: forward takes {wanted}," in first_line
    assert len(listed) == len(candidates)
    assert all(candidate in line for candidate, line in zip(candidates, listed, strict=True))
    assert "--inputs" in caught.value.remedy


def test_the_remedy_is_a_command_that_fits():
    with pytest.raises(ModelError) as caught:
        heard(model_of(two_unknown), {"image": IMAGE, "tokens": TOKENS, "depth": DEPTH})
    assert "--inputs image,tokens)" in caught.value.remedy


@pytest.mark.parametrize(
    ("inputs", "expected", "description"),
    [
        (["mask", "image"], {"mask": MASK, "image": IMAGE}, "model(mask, image)"),
        (["image", "image=mask"], None, "model(image, image=mask)"),
        (["mask=image", "image=mask"], {"mask": IMAGE, "image": MASK}, "model(mask=image, image=mask)"),
        (["image", "mask=depth"], None, "model(image, mask=depth)"),
    ],
)
def test_the_user_spells_the_call_out(inputs, expected, description):
    available = {"image": IMAGE, "mask": MASK, "depth": DEPTH}
    binding = bind_inputs(inputs, available, list(available))
    assert binding.description == description
    if expected is not None:
        assert binding.forward(model_of(by_name), available) == expected


def test_the_user_asks_for_a_dict_of_everything():
    available = OrderedDict(image=IMAGE, mask=MASK, step=3)
    binding = bind_inputs(["*"], available, ["image", "mask"])
    assert binding.forward(model_of(lambda self, x: x), available) == available
    assert binding.description == "model({image, mask, step})"


def test_a_dict_of_everything_may_hold_plain_values_alone():
    binding = bind_inputs(["*"], {"scale": 2.0, "steps": 3}, [])
    assert binding.forward(model_of(lambda self, x: x), {"scale": 2.0, "steps": 3}) == {"scale": 2.0, "steps": 3}


@pytest.mark.parametrize("inputs", [["pixels"], ["image", "mask=pixels"], [""]])
def test_a_missing_input_is_an_error_that_lists_the_names(inputs):
    with pytest.raises(ModelError, match="has no array") as caught:
        bind_inputs(inputs, {"image": IMAGE, "step": 3}, ["image"])
    assert "image, step" in caught.value.remedy
