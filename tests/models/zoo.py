"""Unchanged models of transformers in their smallest configurations, with a batch each.

In: nothing; the weights are random. Out: `MODELS`, by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch import nn

BLOCK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 2], [10, 11, 2, 0, 0, 0]])
TEXT = {"input_ids": TOKENS, "attention_mask": (TOKENS > 0).long()}
NEXT_TOKENS = {"labels": torch.where(TOKENS > 0, TOKENS, -100)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How to make the model, what it is called with, and the field of its output that a training script would save."""

    make: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    output: str = "logits"


def pixels(side: int) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def waves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def make_bert() -> nn.Module:
    return hf.BertForTokenClassification(hf.BertConfig(**BLOCK, **WORDS, num_labels=3))


def make_t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, vocab_size=60, decoder_start_token_id=0))


def make_vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**BLOCK, image_size=16, patch_size=4, num_labels=3))


def make_llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**BLOCK, **WORDS, num_key_value_heads=2))


def make_clip() -> nn.Module:
    return hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**BLOCK, **WORDS, "projection_dim": 16},
            vision_config={**BLOCK, "image_size": 16, "patch_size": 4, "projection_dim": 16},
            projection_dim=16,
        )
    )


def make_wav2vec2() -> nn.Module:
    """With a weight norm on its positional convolution, and masks that it draws from numpy while it trains."""
    config = hf.Wav2Vec2Config(
        **BLOCK,
        vocab_size=20,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
    )
    return hf.Wav2Vec2ForCTC(config)


MODELS = {
    "BERT": Model(make=make_bert, batch={**TEXT, "labels": torch.where(TOKENS > 0, TOKENS % 3, -100)}),
    "T5": Model(make=make_t5, batch={**TEXT, "decoder_input_ids": TOKENS.flip(0), **NEXT_TOKENS}),
    "ViT": Model(make=make_vit, batch={"pixel_values": pixels(16), "labels": torch.tensor([0, 2])}),
    "Llama": Model(make=make_llama, batch={**TEXT, **NEXT_TOKENS}),
    "CLIP": Model(make=make_clip, batch={**TEXT, "pixel_values": pixels(16)}, output="logits_per_image"),
    "Wav2Vec2": Model(
        make=make_wav2vec2,
        batch={"input_values": waves(2, 400), "labels": torch.tensor([[3, 4, 5], [6, 7, -100]])},
    ),
}


def middle_layer(model: nn.Module) -> str:
    """The path of the linear layer in the middle; the names of layers change from one version to the next."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return layers[len(layers) // 2]
