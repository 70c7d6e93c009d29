"""Shape of a DeepSeek-V3-like model, latent attention and experts, for benches: config.json, names and shapes."""

from collections.abc import Iterator

from trainer_core.config import Frozen

BIAS = "e_score_correction_bias"
"""Ends the name of a router's bias, which is fp32 in a model of any precision."""


class LatentModel(Frozen):
    """A model of the DeepSeek-V3 architecture; the first layer is dense."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the dense layer's MLP."""
    expert: int
    """Width of an expert."""
    experts: int
    """Routed experts of a layer, besides a shared one of twice their width."""
    chosen: int
    """Experts of each token."""
    heads: int
    query_rank: int
    """Rank of the latent vector of queries."""
    value_rank: int
    """Rank of the latent vector of keys and values."""
    plain: int
    """Dimensions of a key without position."""
    rotary: int
    """Dimensions of a key with it."""
    value: int
    """Dimensions of a value."""
    vocabulary: int

    def config(self) -> dict[str, object]:
        """The config.json: keys of `transformers.DeepseekV3Config` and those that only vLLM reads."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.expert,
            "n_routed_experts": self.experts,
            "n_shared_experts": 2,
            "num_experts_per_tok": self.chosen,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.value_rank,
            "qk_nope_head_dim": self.plain,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.value,
            "num_nextn_predict_layers": 0,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rope_theta": 50000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the weights."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield from self._attention(f"{prefix}.self_attn")
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            if layer:
                yield from self._experts(f"{prefix}.mlp")
            else:
                yield from self._gated(f"{prefix}.mlp", self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _attention(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.q_a_proj.weight", (self.query_rank, self.hidden)
        yield f"{prefix}.q_a_layernorm.weight", (self.query_rank,)
        yield f"{prefix}.q_b_proj.weight", (self.heads * (self.plain + self.rotary), self.query_rank)
        yield f"{prefix}.kv_a_proj_with_mqa.weight", (self.value_rank + self.rotary, self.hidden)
        yield f"{prefix}.kv_a_layernorm.weight", (self.value_rank,)
        yield f"{prefix}.kv_b_proj.weight", (self.heads * (self.plain + self.value), self.value_rank)
        yield f"{prefix}.o_proj.weight", (self.hidden, self.heads * self.value)

    def _experts(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate.weight", (self.experts, self.hidden)
        yield f"{prefix}.gate.{BIAS}", (self.experts,)
        for expert in range(self.experts):
            yield from self._gated(f"{prefix}.experts.{expert}", self.expert)
        yield from self._gated(f"{prefix}.shared_experts", 2 * self.expert)

    def _gated(self, prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate_proj.weight", (width, self.hidden)
        yield f"{prefix}.up_proj.weight", (width, self.hidden)
        yield f"{prefix}.down_proj.weight", (self.hidden, width)
