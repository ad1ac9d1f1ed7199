"""How arrays find their way into forwards of every signature, and what is said where there is no telling."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nandoctor.errors import ModelError
from nandoctor.step.binding import Offer, bind_inputs, find_bindings

NUMBERS = {"epoch": 3, "timestep": 7, "mode": "train", "batch.step": 4}


def model_of(forward):
    """A Module whose forward is `forward(self, ...)`."""
    return type("Model", (nn.Module,), {"forward": forward})()


def with_signature(signature):
    """A Module whose forward returns what it is given, by parameter."""
    made = {}
    exec(f"def forward(self, {signature}):\n    return {{k: v for k, v in locals().items() if k != 'self'}}", made)
    return model_of(made["forward"])


def offer_of(names, **containers):
    """An offer of arrays, each with numbers of its own, and of the plain values among the names."""
    names = names.split()
    values = {name: NUMBERS.get(name, torch.full((2, 3), float(place))) for place, name in enumerate(names)}
    return Offer(values=values, arrays=[name for name in names if name not in NUMBERS], containers=containers)


class Saved(dict):
    """A container in which `eval` looks up the parts of a dotted name."""

    def __missing__(self, key):
        prefix = f"{self.prefix}.{key}" if self.prefix else str(key)
        if prefix in self.batch:
            return self.batch[prefix]
        inner = Saved()
        inner.batch, inner.prefix = self.batch, prefix
        return inner


def evaluated(description, model, batch):
    """What the printed call gives, with the names of what was saved as variables."""
    scope = Saved(model=model)
    scope.batch, scope.prefix = batch, ""
    return eval(description, {}, scope)


def same(ours, theirs):
    return {k: v for k, v in ours.items() if v is not None} == {k: v for k, v in theirs.items() if v is not None}


CALLS = [
    # parameters of forward; saved arrays; the call
    ("x", "image", "model(x=image)"),
    ("x", "image mask", "model(x=image)"),
    ("x", "labels", "model(x=labels)"),
    ("x", "x depth", "model(x)"),
    ("x", "image epoch", "model(x=image)"),
    ("x", "image depth", "model(x=image)"),
    ("x=None, verbose=False", "image", "model(x=image)"),
    ("mask, image", "image mask extra", "model(mask, image)"),
    ("mask, image", "batch.image batch.mask", 'model(mask=batch["mask"], image=batch["image"])'),
    ("x, mask", "image mask", "model(x=image, mask=mask)"),
    ("image, x", "image foo", "model(image, x=foo)"),
    ("*, image, depth=None", "image", "model(image=image)"),
    ("*, x", "image", "model(x=image)"),
    ("image, /, mask", "mask image", "model(image, mask)"),
    ("x, /", "image", "model(image)"),
    ("*tensors", "image mask", "model(image)"),
    ("image, *rest, **extra", "image mask", "model(image)"),
    ("noisy, timestep, guidance=7.5", "noisy timestep epoch", "model(noisy, timestep)"),
    ("x, mode='eval'", "x mode", "model(x)"),
    ("input_ids=None, attention_mask=None", "input_ids attention_mask", "model(input_ids, attention_mask)"),
    ("input_ids=None, attention_mask=None", "attention_mask", "model(attention_mask=attention_mask)"),
    ("input_ids=None, attention_mask=None", "token_ids", "model(input_ids=token_ids)"),
    ("images, labels", "image label", "model(images=image, labels=label)"),
    ("image, mask", "batch.images batch.masks", 'model(image=batch["images"], mask=batch["masks"])'),
    ("image, boxes", "input_image gt_box", "model(image=input_image, boxes=gt_box)"),
    ("x, context", "image foo", "model(x=image, context=foo)"),
    ("batch", "batch.image epoch batch.step", 'model({"image": batch["image"], "step": batch["step"]})'),
    ("batch", "image mask", 'model({"image": image, "mask": mask})'),
    ("x", "0", "model(x=saved[0])"),
    ("x", "0 1", "model(x=saved[0])"),
    ("x, mask", "batch.0 batch.1 batch.2", "model(x=batch[0], mask=batch[1])"),
    ("mel, lengths", "mel mel_lengths text.lengths", "model(mel, lengths=mel_lengths)"),
    ("mel, lengths", "mel text.lengths", 'model(mel, lengths=text["lengths"])'),
]


@pytest.mark.parametrize(("signature", "saved", "call"), CALLS)
def test_the_call_is_the_one_that_is_printed(signature, saved, call):
    model, offer = with_signature(signature), offer_of(saved)
    binding = find_bindings(model, offer)[0]
    assert binding.description == call
    if "saved[" not in call:
        assert same(binding.forward(model, offer.values), evaluated(call, model, offer.values))


CONTAINED = [
    ("images, targets=None, cache=None", {"targets": [{}], "cache": {}}, "model(images, targets)"),
    ("images, targets", {"targets": {}}, "model(images, targets)"),
    ("batch", {"batch": {}}, "model(batch)"),
    ("*parts", {"parts": [0, 1]}, "model(parts[0], parts[1])"),
]


@pytest.mark.parametrize(("signature", "containers", "call"), CONTAINED)
def test_a_list_or_dict_goes_to_the_parameter_of_its_name(signature, containers, call):
    offer = offer_of("images targets.0.boxes cache.image batch.image parts.0 parts.1", **containers)
    assert find_bindings(with_signature(signature), offer)[0].description == call


def dict_by_annotation(self, x: dict[str, Tensor]):
    return x


def dict_by_mapping_annotation(self, x: Mapping[str, Tensor]):
    return x


def dict_by_subscript(self, x):
    return {**x, "image": x["image"]}


def dict_by_get(self, x):
    return SimpleNamespace(x=x, image=x.get("image")).x


def dict_by_iteration(self, x):
    return {name: value for name, value in x.items()}  # noqa: C416 - the loop is what is read


def dict_by_membership(self, x):
    return x if "image" in x else {}


def dict_by_unpacking(self, x):
    return dict(**x)


def dict_by_name(self, batch):
    return batch


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


@pytest.mark.parametrize("forward", DICT_FORWARDS)
def test_a_parameter_that_is_used_as_a_dict_takes_everything(forward):
    model, offer = model_of(forward), offer_of("image mask epoch")
    dictionary, image, with_attributes = find_bindings(model, offer)
    assert dictionary.forward(model, offer.values) == offer.values
    assert dictionary.takes_all
    assert image.arrays == ("image",)
    assert with_attributes.forward(lambda batch: batch.mask, offer.values) is offer.values["mask"]


def test_a_dict_in_the_file_that_has_the_keys_is_the_batch():
    offer = offer_of("inputs.image inputs.mask targets.label", inputs={"image": 0, "mask": 0}, targets={"label": 0})
    assert find_bindings(model_of(dict_by_subscript), offer)[0].description == "model(x=inputs)"
    flat = offer_of("image other.image other.mask", other={"image": 0, "mask": 0})
    assert find_bindings(model_of(dict_by_subscript), flat)[0].takes_all


def asks_first(self, x):
    return x["image"] + x["mask"] if "mask" in x else x["image"]


def test_a_key_that_need_not_be_there_finds_no_other_dict():
    offer = offer_of("image other.image other.mask", other={"image": 0, "mask": 0})
    assert find_bindings(model_of(asks_first), offer)[0].takes_all


def prediction_annotation(self, x: PredictionInputs):  # noqa: F821 - only its text is read
    return x


def test_a_dict_that_is_passed_on_is_the_second_choice():
    class PassesOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model_of(dict_by_subscript)

        def forward(self, inputs):
            return self.net(inputs)

    for model, name in ((PassesOn(), "inputs"), (model_of(prediction_annotation), "x")):
        described = [binding.description for binding in find_bindings(model, offer_of("image"))]
        whole = 'model({"image": image})'
        assert described == [f"model({name}=image)", whole, whole]  # the last with its items as attributes


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
    bindings = find_bindings(wrap(with_signature("mask, image")), offer_of("image mask extra"))
    assert [binding.description for binding in bindings] == ["model(mask, image)"]


OPEN = [
    # parameters; saved arrays; what is said of the parameters; the arrays listed; the command, or what is lacking
    ("x", "foo bar", "takes x,", "foo bar", "--inputs x=foo"),
    ("x", "labels mask", "takes x,", "labels mask", "--inputs x=labels"),
    ("left, right", "image foo bar", "takes left, right,", "image foo bar", "--inputs left=image,right=foo"),
    ("left, right", "left", "takes right beside left=left,", "none", "nothing for right"),
    ("mask, x", "mask foo bar", "takes x beside mask=mask,", "foo bar", "--inputs mask=mask,x=foo"),
    ("mask, image", "a.image b.image mask", "takes image beside", "a.image b.image", "image=a.image"),
    ("images, x", "image input_image", "takes images, x,", "image input_image", "--inputs images=image,x=input_image"),
    ("*tensors", "image foo", "takes *tensors,", "image foo", "--inputs image,foo"),
    ("", "image", "takes no array,", "image", "--inputs image"),
    ("**kwargs", "image", "takes no array,", "image", "--inputs image"),
    ("x=None", "foo bar", "takes x,", "foo bar", "--inputs x=foo"),
    ("x, mask=None", "0 1", "takes x,", "0 1", "--inputs x=0,mask=1"),
    ("x", "epoch", "takes x,", "none", "nothing for x"),
]


def why_open(model, offer):
    """Return the error that is raised at once, or if the saved output does not decide."""
    try:
        return find_bindings(model, offer)[0].unclear
    except ModelError as error:
        return error


@pytest.mark.parametrize(("signature", "saved", "wanted", "listed", "advice"), OPEN)
def test_what_is_left_on_both_sides_is_said(signature, saved, wanted, listed, advice):
    model, offer = with_signature(signature), offer_of(saved)
    error = why_open(model, offer)
    first_line, *lines = error.message.splitlines()
    assert f"how to call Model: forward {wanted}" in first_line
    assert [line.split()[0] for line in lines] == listed.split()
    assert advice in error.remedy
    if error.options and signature not in ("", "**kwargs"):
        bind_inputs(error.options[1].split(","), offer).forward(model, offer.values)


SPELLED = [
    ("mask image", "mask=mask image=image", "model(mask, image)"),
    ("image image=mask", "", "model(image, image=mask)"),
    ("mask=image image=mask", "mask=image image=mask", "model(mask=image, image=mask)"),
    ("*", "", 'model({"image": image, "mask": mask, "epoch": epoch})'),
]


@pytest.mark.parametrize(("inputs", "heard", "call"), SPELLED)
def test_the_user_spells_the_call_out(inputs, heard, call):
    offer = offer_of("image mask epoch")
    binding = bind_inputs(inputs.split(), offer)
    assert binding.description == call
    if heard:
        pairs = (item.split("=") for item in heard.split())
        made = binding.forward(with_signature("mask, image"), offer.values)
        assert made == {parameter: offer.values[array] for parameter, array in pairs}


@pytest.mark.parametrize("inputs", [["pixels"], ["image", "mask=pixels"], [""]])
def test_a_missing_input_is_an_error_that_lists_the_names(inputs):
    with pytest.raises(ModelError, match="has no array") as caught:
        bind_inputs(inputs, offer_of("image epoch"))
    assert "image and epoch" in caught.value.remedy
