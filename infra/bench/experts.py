"""Models with experts and random weights for benches: the shape of Qwen3-MoE, and files of any size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infra.bench.latent import BIAS, LatentModel
from tasks.config.model import GeneratedModel
from tasks.data.generated import generate_tokenizer
from trainer_core.config import Frozen

if TYPE_CHECKING:
    import torch

_SHARD = 4 << 30  # bytes of a file, at least, but for the last
_DEVIATION = 0.02


class ExpertModel(Frozen):
    """A model of the Qwen3-MoE architecture."""

    layers: int
    hidden: int
    expert: int
    """Width of an expert."""
    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts of each token."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = 8192
    """Longest sequence, in tokens."""

    def config(self) -> dict[str, object]:
        """The config.json, in the fields of `transformers.Qwen3MoeConfig`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "moe_intermediate_size": self.expert,
            "num_experts": self.experts, "num_experts_per_tok": self.chosen, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions, "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
            "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
        }  # fmt: skip

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the weights."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{prefix}.self_attn.{part}_proj.weight", (rows, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, queries)
            for part in ("q", "k"):
                yield f"{prefix}.self_attn.{part}_norm.weight", (self.head_dim,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                for part, shape in (("gate", 0), ("up", 0), ("down", 1)):
                    sizes = (self.hidden, self.expert) if shape else (self.expert, self.hidden)
                    yield f"{prefix}.mlp.experts.{expert}.{part}_proj.weight", sizes
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.experts * self.hidden * (1 + 3 * self.expert)

    def operations(self, tokens: float, length: float) -> float:
        """Floating-point operations of a forward and a backward pass over so many tokens in sequences of that length,
        as `cases.floating_point_operations` counts them; of the experts those that are chosen."""
        width = self.heads * self.head_dim
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + self.hidden * self.experts + self.chosen * 3 * self.hidden * self.expert
        weights = self.layers * layer + self.hidden * self.vocabulary
        return tokens * (6.0 * weights + 6.0 * self.layers * width * length)


def write_random(directory: Path, spec: ExpertModel | LatentModel, seed: int = 0) -> None:
    """Write a model directory with a character tokenizer and random weights in bf16, on a card if there is one. Vectors
    are norms, which begin as ones, and biases of routers, which begin as zeros, in fp32."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generate_tokenizer(directory, GeneratedModel(vocabulary=spec.vocabulary))
    (directory / "config.json").write_text(json.dumps(spec.config() | {"dtype": "bfloat16"}, indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chance = torch.Generator(device).manual_seed(seed)
    places, held, size = dict[str, str](), dict[str, torch.Tensor](), 0

    def flush() -> None:
        name = f"model-{len(set(places.values())):05d}.safetensors"
        save_file(held, directory / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, shape in spec.shapes():
        held[name] = _drawn(name, shape, chance).cpu()
        size += held[name].nbytes
        if size >= _SHARD:
            flush()
            size = 0
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _drawn(name: str, shape: tuple[int, ...], chance: "torch.Generator") -> "torch.Tensor":
    import torch

    if name.endswith(BIAS):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=chance.device)
    return drawn.normal_(0.0, _DEVIATION, generator=chance)
