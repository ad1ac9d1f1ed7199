"""Unchanged models of transformers, small and with random weights, replayed from a live module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nandoctor
from nandoctor.dumps.dump import Dump

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = (TOKENS > 0).long()
PIXELS = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
WHISPER = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8, "vocab_size": 50},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"max_source_positions": 20, "max_target_positions": 20, "decoder_start_token_id": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
SEGFORMER = {
    "depths": [1] * 4,
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1] * 4,
    "decoder_hidden_size": 16,
    "initializer_range": 0.5,
}

MODELS = {
    "Bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **SMALL)),
        {"input_ids": TOKENS, "attention_mask": MASK},
        "bert.encoder.layer.0.attention.self.query",
    ),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, vocab_size=50)
        ),
        {"input_ids": TOKENS, "attention_mask": MASK, "decoder_input_ids": TOKENS},
        "decoder.block.0.layer.1.EncDecAttention.q",
    ),
    "ViT": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)),
        {"pixel_values": PIXELS},
        "classifier",
    ),
    "Whisper": (
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)),
        {"input_features": PIXELS[:, 0, :8].repeat(1, 1, 2)[..., :40], "decoder_input_ids": TOKENS},
        "model.decoder.layers.0.fc1",
    ),
    "Llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SMALL)),
        {"input_ids": TOKENS, "attention_mask": MASK},
        "model.layers.0.mlp.gate_proj",
    ),
    "Segformer": (
        lambda: transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**SEGFORMER)),
        {"pixel_values": PIXELS},
        "decode_head.classifier",
    ),
}


def dump_of(model, arrays, logits):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Dump(path=Path("dump.pth"), nbytes=1, layout="plain", state=state, arrays={**arrays, "logits": logits})


@pytest.mark.parametrize(("make", "arrays", "layer"), MODELS.values(), ids=MODELS)
def test_the_layer_that_overflows_is_named(make, arrays, layer):
    torch.manual_seed(0)
    model = make().eval()
    torch.nn.init.uniform_(model.get_submodule(layer).weight, -6e4, 6e4)
    with torch.no_grad():
        logits = model(**arrays).logits
    case = nandoctor.replay(dump_of(model, arrays, torch.full_like(logits, torch.nan)), model, mode="eval", fixes=False)
    assert (case.verdict, case.first_nonfinite.place.module) == ("precision", layer)
    assert case.first_nonfinite.would_be > 65504
    assert case.report.runs.fp32.finite


@pytest.mark.parametrize("name", ["Bert", "Segformer"])
def test_the_mode_that_the_output_was_saved_in_is_found(name):
    torch.manual_seed(0)
    make, arrays, _ = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        logits = model(**arrays).logits
    report = nandoctor.replay(dump_of(model, arrays, logits), model, fixes=False).report
    assert (report.verdict, report.reproduction.grade) == ("healthy", "exact")
    assert report.runs.autocast.training is False
    assert report.reproduction.max_rel_err < 1e-2
