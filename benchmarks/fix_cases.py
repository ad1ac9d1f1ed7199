"""The steps whose fixes are judged: sick models, the sample dumps, failures inside libraries, bugs of packages.

`CASES` has all but the last by name, each a sick model with its batch; `case_named` returns any of them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from real_bugs import geometry, pictures_and_sound, probability, sequences, threads  # noqa: E402
from real_bugs.bug import Bug  # noqa: E402
from sick_models import all_cases  # noqa: E402
from sick_models.case import Batch, Case, rand, scaled, seeded  # noqa: E402

SAMPLES: dict[str, tuple[str, Callable[[nn.Module, Batch], Any]]] = {
    "unet_blank_tile": ("UNet", lambda model, batch: model({"image": batch["image"], "mask": batch["mask"]})),
    "attention_scores": ("Forecaster", lambda model, batch: model(batch["sales"])),
    "residual_stream": ("ResidualNetwork", lambda model, batch: model(batch["features"])),
    "poisoned_buffers": ("Classifier", lambda model, batch: model(batch["image"])),
    "log_saturated": ("Classifier", lambda model, batch: model(batch["features"])),
}
"""Each sample's model, and the call that its script makes; the sample dumps have no loss."""


def _sample(name: str) -> Case:
    script = ROOT / "sample_dumps" / f"{name}.py"
    saved = torch.load(script.with_suffix(".pth"), weights_only=False)
    weights = saved.pop("state_dict")
    model_name, call = SAMPLES[name]

    def build() -> nn.Module:
        model: nn.Module = runpy.run_path(str(script))[model_name]()
        model.load_state_dict({key: torch.as_tensor(value) for key, value in weights.items()})
        return model

    return Case(
        name=f"sample/{name}",
        mechanism="sample",
        build=build,
        batch=lambda: {key: torch.from_numpy(value.copy()) for key, value in saved.items()},
        call=call,
        train=name != "poisoned_buffers",
        verdict="precision",
    )


def _library(name: str, make: Callable[[], nn.Module], batch: Batch, *, spoil: tuple[str, ...], by: float) -> Case:
    """Return a transformers model with some weights so large that their products overflow fp16."""

    def build() -> nn.Module:
        model = make()
        with torch.no_grad():
            for path in spoil:
                model.get_parameter(path).mul_(by)
        return model

    return Case(
        name=f"library/{name}",
        mechanism="library",
        build=seeded(build),
        batch=lambda: dict(batch),
        call=lambda model, arrays: model(**arrays)[0],
        verdict="precision",
    )


def _make_bert_with_eager_attention() -> nn.Module:
    import transformers as hf
    from models import zoo

    config = hf.BertConfig(**zoo.BLOCK, **zoo.WORDS, num_labels=3, attn_implementation="eager")
    return hf.BertForTokenClassification(config)


def _libraries() -> list[Case]:
    from models import zoo

    text = {"input_ids": zoo.TOKENS, "attention_mask": (zoo.TOKENS > 0).long()}
    both = {**text, "decoder_input_ids": zoo.TOKENS.flip(0)}
    image = {"pixel_values": zoo.pixels(16)}
    attention = "bert.encoder.layer.0.attention.self"
    scores = (f"{attention}.query.weight", f"{attention}.key.weight")
    return [
        _library("bert-dense", zoo.make_bert, text, spoil=("bert.encoder.layer.0.intermediate.dense.weight",), by=5e5),
        _library("bert-scores", _make_bert_with_eager_attention, text, spoil=scores, by=4e3),
        _library("t5-dense", zoo.make_t5, both, spoil=("encoder.block.0.layer.1.DenseReluDense.wi.weight",), by=3e4),
        _library("llama-query", zoo.make_llama, text, spoil=("model.layers.0.self_attn.q_proj.weight",), by=8e5),
        _library("vit-query", zoo.make_vit, image, spoil=("vit.layers.0.attention.q_proj.weight",), by=8e5),
        Case(
            name="library/torch-encoder-layer",
            mechanism="library",
            build=seeded(lambda: scaled(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 600.0)),
            batch=lambda: {"x": rand(4, 5, 8)},
            call=lambda model, batch: model(batch["x"]),
            verdict="precision",
        ),
    ]


CASES = {case.name: case for case in (*all_cases(), *map(_sample, SAMPLES), *_libraries())}
BUGS: dict[str, Bug] = {
    f"real/{bug.title}": bug
    for module in (pictures_and_sound, sequences, probability, geometry, threads)
    for bug in module.BUGS
}


def case_named(name: str) -> Case:
    """Return the case of this name; one of a package imports that package as soon as its model is built."""
    return BUGS[name].case() if name in BUGS else CASES[name]
