"""Transformers of today and yesterday: the published configurations; the architectures are those of `transformers`."""

from __future__ import annotations

from transformers import BertConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig


def bert_base() -> PretrainedConfig:
    """BERT-base, uncased (Devlin et al. 2018, arXiv:1810.04805)."""
    return BertConfig(
        architectures=["BertModel"], vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=3072, max_position_embeddings=512, type_vocab_size=2,
    )  # fmt: skip


def gpt_2() -> PretrainedConfig:
    """GPT-2, the smallest of four (Radford et al. 2019)."""
    return GPT2Config(
        architectures=["GPT2LMHeadModel"], vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12,
    )  # fmt: skip


def llama_3_8b() -> PretrainedConfig:
    """Llama 3 8B, as the config.json of meta-llama/Meta-Llama-3-8B has it."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def qwen3_30b_a3b() -> PretrainedConfig:
    """Qwen3-30B-A3B: 128 experts a layer, 8 of them for each token; as the config.json of Qwen/Qwen3-30B-A3B has it."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=151936, hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
