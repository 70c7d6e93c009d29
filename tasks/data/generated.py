"""Generated inputs of a run: a small model with its tokenizer, and an addition data set. This needs neither torch nor a
download; the same seed gives the same bytes."""

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from storage.errors import InputError
from tasks.config.data import GeneratedAddition
from tasks.config.model import GeneratedModel
from tasks.data.backends import GENERATED, PAD, STOP, UNKNOWN
from tasks.data.files import Record

CHARACTERS = "0123456789+-= "
_ROPE_THETA = 10000.0


def generate_model(directory: Path, spec: GeneratedModel, seed: int) -> None:
    """Write a Hugging Face directory of a Qwen3-architecture model with random weights and a character tokenizer."""
    generate_tokenizer(directory, spec)
    save_file(dict(_weights(spec, seed)), str(directory / "model.safetensors"), metadata={"format": "pt"})


def generate_tokenizer(directory: Path, spec: GeneratedModel) -> None:
    """Write such a directory without the weights. Raises InputError: the vocabulary is smaller than the tokenizer's."""
    tokenizer = character_tokenizer()
    if (size := tokenizer.get_vocab_size()) > spec.vocabulary:
        fact = f"model.generate.vocabulary = {spec.vocabulary} is smaller than the character tokenizer's {size}"
        raise InputError(f"{fact}: raise it")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(GENERATED, indent=1))
    (directory / "config.json").write_text(json.dumps(model_config(spec), indent=1))


def character_tokenizer() -> Tokenizer:
    """One token per character; ids 0, 1 and 2 are padding, stop and unknown."""
    vocabulary = {token: number for number, token in enumerate((PAD, STOP, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([PAD, STOP, UNKNOWN])
    return tokenizer


def model_config(spec: GeneratedModel) -> dict[str, Any]:
    """The model's config.json, in the fields of `transformers.Qwen3Config`."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "vocab_size": spec.vocabulary, "hidden_size": spec.hidden, "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "hidden_act": "silu", "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-6, "rope_theta": _ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
        "tie_word_embeddings": spec.tied_embeddings, "initializer_range": spec.initializer_range,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip


def generate_addition(section: GeneratedAddition, seed: int) -> dict[str, list[Record]]:
    """Prompts such as `47+38=` with answers such as `085`, and demonstrations for the warm-up. A sum and its commuted
    twin are in the same split, so no held-out prompt is seen in training in either order. A share of the demonstrations
    forgets to carry: `47+38=` is shown as `075`. Returns the records of train, held_out and, if requested, warmup.
    Raises InputError: the held-out sums leave none for training."""
    rng = random.Random(f"addition {seed}")
    operands = range(section.min_operand, section.max_operand + 1)
    pairs = list(itertools.combinations_with_replacement(operands, 2))
    rng.shuffle(pairs)
    made = itertools.accumulate(1 + (first != second) for first, second in pairs)  # prompts: a pair of equals gives one
    count = next((number for number, total in enumerate(made, 1) if total >= section.held_out), len(pairs))
    held_out, train = _prompts(pairs[:count], section, rng), _prompts(pairs[count:], section, rng)
    if not train:
        fact = f"data.generate.held_out = {section.held_out} leaves none of the {len(pairs)} sums for training"
        raise InputError(f"{fact}: lower it or widen the operands")
    tables: dict[str, list[Record]] = {"train": train, "held_out": held_out[: section.held_out]}
    if section.warmup:
        tables["warmup"] = [_demonstration(record, section, rng) for record in train[: section.warmup]]
    return tables


def forget_carries(first: int, second: int) -> int:
    """The sum of each pair of digits without the carry into the next: 47 + 38 gives 75."""
    digits = itertools.zip_longest(reversed(str(first)), reversed(str(second)), fillvalue="0")
    return sum((int(a) + int(b)) % 10 * 10**place for place, (a, b) in enumerate(digits))


def _prompts(pairs: list[tuple[int, int]], section: GeneratedAddition, rng: random.Random) -> list[Record]:
    ordered = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    rng.shuffle(ordered)
    return [_record(first, second, first + second, section) for first, second in ordered]


def _record(first: int, second: int, answer: int, section: GeneratedAddition) -> Record:
    width = len(str(section.max_operand))
    return {
        "id": f"{first}+{second}",
        "prompt": f"{first:0{width}d}+{second:0{width}d}=",
        "answer": f"{answer:0{width + 1}d}",
    }


def _demonstration(record: Record, section: GeneratedAddition, rng: random.Random) -> Record:
    first, second = map(int, record["id"].split("+"))
    mistaken = rng.random() < section.warmup_mistakes
    return _record(first, second, forget_carries(first, second) if mistaken else first + second, section)


def shapes(facts: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a Llama, Mistral, Qwen2 or Qwen3 with this config.json, in the order in which
    those of a generated model are drawn."""
    hidden, heads, inner = facts["hidden_size"], facts["num_attention_heads"], facts["intermediate_size"]
    name = facts["architectures"]
    size = int(facts.get("head_dim") or hidden // heads)
    queries, keys = heads * size, int(facts.get("num_key_value_heads") or heads) * size
    yield "model.embed_tokens.weight", (facts["vocab_size"], hidden)
    rest = {
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for layer in range(facts["num_hidden_layers"]):
        before = f"model.layers.{layer}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{before}self_attn.{part}_proj.weight", (rows, hidden)
            if name[0] == "Qwen2ForCausalLM":
                yield f"{before}self_attn.{part}_proj.bias", (rows,)
            if name[0] == "Qwen3ForCausalLM" and part != "v":
                yield f"{before}self_attn.{part}_norm.weight", (size,)
        yield from ((f"{before}{one}.weight", shape) for one, shape in rest.items())
    yield "model.norm.weight", (hidden,)
    if not facts.get("tie_word_embeddings"):
        yield "lm_head.weight", (facts["vocab_size"], hidden)


def _weights(spec: GeneratedModel, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Random matrices; the vectors are norms, which begin as ones."""
    rng = np.random.default_rng([seed, 1])
    for name, shape in shapes(model_config(spec)):
        if len(shape) == 1:
            yield name, np.ones(shape, dtype=np.float32)
        else:
            yield name, rng.standard_normal(shape, dtype=np.float32) * np.float32(spec.initializer_range)
