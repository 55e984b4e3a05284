"""Transformers of today and yesterday: the published configurations, with random weights, as in `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, DynamicCache, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig


def bert_base() -> nn.Module:
    """BERT-base, uncased (Devlin et al. 2018, arXiv:1810.04805)."""
    return _built("BertModel", _BERT_BASE)


def bert_base_for_classification() -> nn.Module:
    """BERT-base with a classifier of two classes, as it is fine-tuned for CoLA."""
    return _built("BertForSequenceClassification", _BERT_BASE)


def gpt_2() -> nn.Module:
    """GPT-2, the smallest of four (Radford et al. 2019)."""
    return _built("GPT2LMHeadModel", _GPT_2)


def llama_3_8b() -> nn.Module:
    """Llama 3 8B, as the config.json of meta-llama/Meta-Llama-3-8B has it."""
    return _built("LlamaForCausalLM", _LLAMA_3_8B)


def qwen3_30b_a3b() -> nn.Module:
    """Qwen3-30B-A3B: 128 experts a layer, 8 of them for each token; as the config.json of Qwen/Qwen3-30B-A3B has it."""
    return _built("Qwen3MoeForCausalLM", _QWEN3_30B_A3B)


class Decoding(nn.Module):
    """Writes one token. The keys and values of those before it come in as tensors, two for each layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, token: Tensor, *cache: Tensor) -> Tensor:
        past: Any = DynamicCache(config=self.model.config)
        for layer, keys, values in zip(past.layers, cache[::2], cache[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return self.model(token, past_key_values=past, use_cache=True).logits

    def cache(self, batch: int, tokens: int) -> list[Tensor]:
        """Of so many tokens, with random content."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, heads, tokens, width)
        return [torch.randn(shape, dtype=self.model.dtype) for _ in range(2 * config.num_hidden_layers)]


# A cache of keys and values is kept only by a call that asks for it.
_BERT_BASE = BertConfig(
    vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    max_position_embeddings=512, type_vocab_size=2,
)  # fmt: skip
_GPT_2 = GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, use_cache=False)
_LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, use_cache=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
_QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, use_cache=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def _built(architecture: str, config: PretrainedConfig) -> nn.Module:
    kind = getattr(transformers, architecture)
    return kind._from_config(config, dtype=config.dtype or torch.float32, attn_implementation="sdpa")
