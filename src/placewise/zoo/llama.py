"""Llama 3 8B, op by op, with the module paths of transformers' `LlamaForCausalLM`.

Shapes are those of the published config.json (meta-llama/Meta-Llama-3-8B); a multiply-add is two FLOPs. Attention is
one fused op that keeps its scores on chip and skips what the causal mask hides. Logits are computed for every token, as
a plain forward call does.
"""

from __future__ import annotations

from placewise.graph import Graph, Tensor
from placewise.zoo.builder import ModelBuilder

_HIDDEN = 4096
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
_KV = _KV_HEADS * _HEAD
_MLP = 14336
_VOCABULARY = 128256

# FLOPs per element of the ops that are no matrix products; they are bound by memory traffic anyway.
_NORM, _ROPE, _SOFTMAX, _SILU_MUL = 4, 3, 5, 5


def llama_3_8b(*, batch: int = 1, tokens: int = 512, layers: int = 32) -> Graph:
    """The forward pass over a prompt."""
    return _Llama("llama-3-8b", batch, tokens, cached=0).build(layers)


def llama_3_8b_decode(*, batch: int = 1, cached: int = 512, layers: int = 32) -> Graph:
    """The forward pass for one more token; the keys and values of those before it are state."""
    return _Llama("llama-3-8b-decode", batch, tokens=1, cached=cached).build(layers)


class _Llama(ModelBuilder):
    def __init__(self, name: str, batch: int, tokens: int, cached: int) -> None:
        super().__init__(name, "bfloat16")
        self.batch, self.tokens, self.cached = batch, tokens, cached
        self.rows = batch * tokens

    def build(self, layers: int) -> Graph:
        (ids,) = self.op("input_ids", kind="input", outputs=[self.rows * 8.0])
        hidden = self.embedding("model.embed_tokens", ids)
        for i in range(layers):
            hidden = self.decoder_layer(f"model.layers.{i}", hidden)
        hidden = self.norm("model.norm", hidden)
        self.linear("lm_head", hidden, _HIDDEN, _VOCABULARY)
        return self.graph()

    def decoder_layer(self, path: str, hidden: Tensor) -> Tensor:
        attended = self.attention(f"{path}.self_attn", self.norm(f"{path}.input_layernorm", hidden))
        hidden = self.add(f"{path}.attention_residual", hidden, attended, module=path)
        transformed = self.mlp(f"{path}.mlp", self.norm(f"{path}.post_attention_layernorm", hidden))
        return self.add(f"{path}.mlp_residual", hidden, transformed, module=path)

    def attention(self, path: str, x: Tensor) -> Tensor:
        query = self.linear(f"{path}.q_proj", x, _HIDDEN, _HIDDEN)
        key = self.linear(f"{path}.k_proj", x, _HIDDEN, _KV)
        value = self.linear(f"{path}.v_proj", x, _HIDDEN, _KV)
        query = self.rope(f"{path}.q_rope", query, _HIDDEN, module=path)
        key = self.rope(f"{path}.k_rope", key, _KV, module=path)
        inputs = [query, key, value]
        if self.cached:
            before = self.batch * self.cached * _KV
            inputs += [self.stored(f"{path}.{cache}", before, kind="state") for cache in ("key_cache", "value_cache")]
        # Token t sees the cached tokens, those of this call before it, and itself.
        seen = self.batch * (self.tokens * self.cached + self.tokens * (self.tokens + 1) // 2)
        flops = _HEADS * seen * (2 * 2 * _HEAD + _SOFTMAX)
        mixed = self.compute(f"{path}.attention", "attention", inputs, self.rows * _HIDDEN, flops=flops, module=path)
        return self.linear(f"{path}.o_proj", mixed, _HIDDEN, _HIDDEN)

    def mlp(self, path: str, x: Tensor) -> Tensor:
        gate = self.linear(f"{path}.gate_proj", x, _HIDDEN, _MLP)
        up = self.linear(f"{path}.up_proj", x, _HIDDEN, _MLP)
        size = self.rows * _MLP
        gated = self.compute(f"{path}.silu_mul", "silu_mul", [gate, up], size, flops=_SILU_MUL * size, module=path)
        return self.linear(f"{path}.down_proj", gated, _MLP, _HIDDEN)

    def embedding(self, path: str, ids: Tensor) -> Tensor:
        table = self.stored(f"{path}.weight", _VOCABULARY * _HIDDEN)
        size = self.rows * _HIDDEN
        # A look-up reads one row of the table per token, not the table.
        moved = self.size(ids) + 2 * size * self.item_bytes
        return self.compute(path, "embedding", [ids, table], size, bytes_accessed=moved)

    def norm(self, path: str, x: Tensor) -> Tensor:
        weight = self.stored(f"{path}.weight", _HIDDEN)
        size = self.rows * _HIDDEN
        return self.compute(path, "rms_norm", [x, weight], size, flops=_NORM * size)

    def linear(self, path: str, x: Tensor, inputs: int, outputs: int) -> Tensor:
        weight = self.stored(f"{path}.weight", inputs * outputs)
        return self.compute(path, "linear", [x, weight], self.rows * outputs, flops=2 * self.rows * inputs * outputs)

    def rope(self, name: str, x: Tensor, width: int, *, module: str) -> Tensor:
        size = self.rows * width
        return self.compute(name, "rope", [x], size, flops=_ROPE * size, module=module)

    def add(self, name: str, x: Tensor, y: Tensor, *, module: str) -> Tensor:
        size = self.rows * _HIDDEN
        return self.compute(name, "add", [x, y], size, flops=size, module=module)
