"""Check that the safetensors files of a model are whole and hold the tensors of its config.json.

It reads headers only, so it takes milliseconds however large the model is."""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from storage.errors import InputError
from tasks.data.hub import INDEX
from tasks.data.models import ModelFolder
from tasks.model_checks.architectures import LLAMA_LIKE, architecture_of, head_size, key_value_heads

Shape = tuple[int, ...]

_LENGTH = 8
_LONGEST_HEADER = 100 << 20  # as safetensors itself
_TYPES = {"F32", "BF16", "F16"}
_HEAD = "lm_head.weight"


def check_weights(folder: ModelFolder, facts: Mapping[str, Any]) -> None:
    """Raises InputError, naming the file or the tensor: weights are not whole, quantized, or do not fit config.json."""
    sizes, found = folder.files(), dict[str, Shape]()
    for name in folder.weights():
        found |= _tensors(folder, name, sizes[name])
    if INDEX in sizes:
        missing = sorted(set(folder.document(INDEX)["weight_map"]) - set(found))
        if missing:
            raise InputError(
                f"{folder}: {INDEX} names {missing[0]}, which is in none of its files: copy the model again"
            )
    if architecture_of(facts, str(folder)) in LLAMA_LIKE:
        _compare(dict(expected_shapes(facts)), found, str(folder), bool(facts.get("tie_word_embeddings")))


def _tensors(folder: ModelFolder, name: str, size: int) -> dict[str, Shape]:
    """Names and shapes of the tensors in a file, after its header is compared with its size."""
    length = struct.unpack("<Q", folder.read(name, 0, _LENGTH))[0] if size >= _LENGTH else 0
    if not 0 < length <= min(size - _LENGTH, _LONGEST_HEADER):
        raise InputError(f"{folder}: {name} is not a safetensors file, or is cut off: copy the model again")
    try:
        header = json.loads(folder.read(name, _LENGTH, _LENGTH + length))
        tensors = {key: value for key, value in header.items() if key != "__metadata__"}
        ends = [value["data_offsets"][1] for value in tensors.values()]
        shapes = {key: tuple(map(int, value["shape"])) for key, value in tensors.items()}
        types = {key: value["dtype"] for key, value in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{folder}: the header of {name} is damaged ({error!r}): copy the model again") from None
    expected = _LENGTH + length + max(ends, default=0)
    if size != expected:
        raise InputError(f"{folder}: {name} has {size} bytes, but its header describes {expected}: copy it again")
    for tensor, kind in types.items():
        if kind not in _TYPES:
            raise InputError(f"{folder}: {tensor} in {name} is of type {kind}: use the model in bf16 or fp32")
    return shapes


def _compare(expected: dict[str, Shape], found: Mapping[str, Shape], where: str, tied: bool) -> None:
    for name, shape in expected.items():
        if name not in found:
            if name == _HEAD and tied:
                continue
            raise InputError(
                f"{where}: the weights lack {name}, which config.json asks for: take the config.json that "
                "belongs to the weights"
            )
        if found[name] != shape:
            raise InputError(
                f"{where}: {name} has the shape {list(found[name])}, but config.json describes {list(shape)}: take the "
                "config.json that belongs to the weights"
            )
    layers = {name for name in found if name.startswith("model.layers.")}
    if more := sorted(layers - set(expected) - {name for name in layers if "rotary_emb" in name}):
        raise InputError(
            f"{where}: the weights hold {more[0]}, which config.json does not describe: take the config.json that "
            "belongs to the weights"
        )


def expected_shapes(facts: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor of a Llama, Mistral, Qwen2 or Qwen3 with this config.json."""
    hidden, size, name = facts["hidden_size"], head_size(facts), architecture_of(facts, "")
    queries, keys, inner = (
        facts["num_attention_heads"] * size,
        key_value_heads(facts) * size,
        facts["intermediate_size"],
    )
    yield "model.embed_tokens.weight", (facts["vocab_size"], hidden)
    for layer in range(facts["num_hidden_layers"]):
        before = f"model.layers.{layer}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{before}self_attn.{part}_proj.weight", (rows, hidden)
            if name == "Qwen2ForCausalLM":
                yield f"{before}self_attn.{part}_proj.bias", (rows,)
            if name == "Qwen3ForCausalLM" and part != "v":
                yield f"{before}self_attn.{part}_norm.weight", (size,)
        yield f"{before}self_attn.o_proj.weight", (hidden, queries)
        yield f"{before}mlp.gate_proj.weight", (inner, hidden)
        yield f"{before}mlp.up_proj.weight", (inner, hidden)
        yield f"{before}mlp.down_proj.weight", (hidden, inner)
        yield f"{before}input_layernorm.weight", (hidden,)
        yield f"{before}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield _HEAD, (facts["vocab_size"], hidden)
