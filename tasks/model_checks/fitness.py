"""All checks of a model in their order; that of its safetensors files reads headers only."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import InputError
from tasks.config.run import RunConfig
from tasks.data.generated import model_config, shapes
from tasks.data.hub import INDEX
from tasks.data.models import ModelFolder, open_model
from tasks.model_checks import architectures
from tasks.model_checks.architectures import LLAMA_LIKE, architecture_of
from trainer_core.config import (
    FP8_POSITIONS,
    Device,
    TrainerConfig,
    check_context,
    check_layout,
    decoder_of,
    experts_of,
)
from trainer_core.effects import Unused, without_effect
from trainer_core.lora import LIVE_RANKS, LoraConfig, check_targets
from trainer_core.platform import te_absent

Facts = Mapping[str, Any]  # content of a model's config.json

_TOKENIZER = "tokenizer_config.json"
_OF_ROUTERS = ("experts.auxiliary_loss", "experts.bias_update_rate", "experts.replay")

Shape = tuple[int, ...]
_LENGTH = 8
_LONGEST_HEADER = 100 << 20  # as safetensors itself
_TYPES = {"F32", "BF16", "F16"}
_HEAD, _SCORE, _CONSTANT = "lm_head.weight", "score.weight", "score.bias"
_REPAIR = "take the config.json that belongs to the weights"


def source_facts(config: RunConfig, device: Device) -> Facts:
    """Checked config.json of a new run's model. Raises InputError: it is not whole, or cannot be trained or served."""
    section = config.model
    if section.generate is not None:
        return model_config(section.generate)
    return folder_facts(open_model(section), device, section.accept)


def folder_facts(folder: ModelFolder, device: Device, accept: Sequence[str]) -> Facts:
    """Checked config.json of a model's folder; raises as `source_facts`."""
    return _checked(folder, folder.config(), device, accept)


def classifier_facts(folder: ModelFolder, device: Device, accept: Sequence[str], constant: bool = False) -> Facts:
    """The same of a reward model, as those of the model below its score, which may have a `constant`. Raises InputError
    besides: it has no score for each position, or several."""
    facts = folder.config()
    labels = len(facts.get("id2label") or ()) or facts.get("num_labels", 2)  # 2 is the default of transformers
    if labels != 1:
        fact = f"{folder} tells {labels} classes apart (id2label or num_labels in config.json)"
        raise InputError(f"{fact}, and a value is one number: choose a model with one label")
    ends = (_SCORE, _CONSTANT) if constant else (_SCORE,)
    return _checked(folder, {**facts, **decoder_of(facts)}, device, accept, ends)


def _checked(
    folder: ModelFolder, facts: Facts, device: Device, accept: Sequence[str], ends: Sequence[str] = ()
) -> Facts:
    there = folder.files()
    architectures.check_architecture(facts, device, accept, str(folder))
    if _TOKENIZER in there and folder.document(_TOKENIZER).get("auto_map"):
        fact = f"{folder} brings a tokenizer with code of its own (auto_map in {_TOKENIZER}), which is not run"
        raise InputError(f"{fact}: use a model whose tokenizer transformers has")
    architectures.check_numbers(facts, str(folder))
    check_weights(folder, facts, ends)
    return facts


def check_fit(config: RunConfig, facts: Facts, device: Device, where: str) -> None:
    """Raises InputError, naming the keys: the configuration does not fit the model, which messages call `where`."""
    architectures.check_numbers(facts, where)
    check_layout(config.train.parallel, facts)
    if config.train.lora is not None:
        architectures.check_export(facts, "train.lora", where)
        check_targets(config.train.lora, facts, experts_of(facts))
        if config.engine.adapter == "live":
            _check_live(config, config.train.lora, facts, device, where)
    if device == "cuda" and not te_absent.is_absent():
        check_context(config.train, True, bool(config.device.deterministic))
        if config.train.parallel.context > 1:
            architectures.check_full_attention(facts, where)
    heads, parts = facts["num_attention_heads"], config.engine.tensor
    if config.retrain is None and heads % parts:
        fact = f"the attention heads of {where} ({heads}) cannot be divided by engine.tensor = {parts}"
        raise InputError(f"{fact}: choose a smaller one")
    if config.retrain is None and (wanted := config.engine.quantization) is not None:
        _check_numbers_of_fp8(f'engine.quantization = "{wanted}"', facts, device, where)
    if config.train.fp8 is not None:
        _check_fp8(config.train.fp8, facts, device, where)
    if unused := without_effect(config.train, _without_experts(facts), "train."):
        raise InputError(f"{where}: {'; '.join(unused)}")
    architectures.check_head_size(facts, device, where)
    architectures.check_window(facts, config.train.max_length, where)
    context = int(facts["max_position_embeddings"])
    lengths = {"engine.max_model_len": config.engine.max_model_len, "train.max_length": config.train.max_length}
    for name, length in lengths.items():
        if length > context:
            raise InputError(f"{name} = {length} is longer than the model's context of {context} tokens: lower it")


def _check_live(config: RunConfig, lora: LoraConfig, facts: Facts, device: Device, where: str) -> None:
    given, repair = 'engine.adapter = "live"', 'set engine.adapter = "merged"'
    if device == "cuda" and config.device.deterministic is True:
        fact = f"{given} is not deterministic on cards, whose kernels add parts in an order of their own"
        raise InputError(f'{fact}: {repair}, or device.deterministic = "trainer"')
    if (architecture := architecture_of(facts, where)) not in LLAMA_LIKE:
        fact = f"{given} is proven for {', '.join(sorted(LLAMA_LIKE))}, and {where} is {architecture}"
        raise InputError(f"{fact}: {repair}")
    if lora.rank > LIVE_RANKS[-1]:
        fact = f"{given} serves adapters of rank {LIVE_RANKS[-1]} at most, and train.lora.rank is {lora.rank}"
        raise InputError(f"{fact}: lower it, or {repair}")


def _check_fp8(wanted: str, facts: Facts, device: Device, where: str) -> None:
    given = f'train.fp8 = "{wanted}"'
    _check_numbers_of_fp8(given, facts, device, where)
    head, heads = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"], "num_attention_heads"
    sizes = {name: int(facts[name]) for name in ("hidden_size", "intermediate_size")} | {heads: head * facts[heads]}
    for name, size in sizes.items():
        if size % FP8_POSITIONS:
            fact = f"{given} takes sizes that {FP8_POSITIONS} divides, not {size} ({name} of {where})"
            raise InputError(f"{fact}: leave it out")
    if te_absent.is_absent():
        raise InputError(f"{given} is computed by Transformer Engine, which is not installed here: leave it out")


def _check_numbers_of_fp8(given: str, facts: Facts, device: Device, where: str) -> None:
    if device == "cpu":
        fact = f"{given} takes a card with FP8 units, and this run computes on CPU"
        raise InputError(f'{fact}: leave it out, or set device.kind = "cuda" where there is such a card')
    if (architecture := architecture_of(facts, where)) not in LLAMA_LIKE:
        fact = f"{given} is proven for {', '.join(sorted(LLAMA_LIKE))}, and {where} is {architecture}"
        raise InputError(f"{fact}: leave it out")


def _without_experts(facts: Facts) -> list[Unused[TrainerConfig]]:
    """Settings of experts that have no effect on this model."""
    if not experts_of(facts):
        reason, names = "a model without experts", (*_OF_ROUTERS, "parallel.expert_tensor")
    elif architectures.architecture_of(facts, "") == "Qwen3MoeForCausalLM":
        reason, names = "a model whose routers have no biases", ("experts.bias_update_rate",)
    else:
        return []
    return [Unused(name, lambda _: reason) for name in names]


def check_weights(folder: ModelFolder, facts: Mapping[str, Any], ends: Sequence[str] = ()) -> None:
    """Raises InputError, naming the file or the tensor: weights are not whole, quantized, or do not fit config.json;
    of a model that scores in place of predicting, its score is not one number, or has other parts than `ends`."""
    sizes, found = folder.files(), dict[str, Shape]()
    for name in folder.weights():
        found |= _tensors(folder, name, sizes[name])
    named = folder.document(INDEX)["weight_map"] if INDEX in sizes else ()
    if missing := sorted(set(named) - set(found)):
        raise InputError(f"{folder}: {INDEX} names {missing[0]}, which none of its files has: copy the model again")
    if ends:
        _check_score(facts, found, str(folder), ends)
    if architecture_of(facts, str(folder)) in LLAMA_LIKE:
        _compare({**facts, "tie_word_embeddings": True} if ends else facts, found, str(folder))


def _check_score(facts: Mapping[str, Any], found: Mapping[str, Shape], where: str, ends: Sequence[str]) -> None:
    if (shape := found.get(_SCORE)) != (1, facts["hidden_size"]):
        there = "lack it" if shape is None else f"have it with the shape {list(shape)}"
        fact = f"{where}: a value takes {_SCORE} of the shape [1, {facts['hidden_size']}], and the weights {there}"
        raise InputError(f"{fact}: take a folder that `ratchet export` made of a reward model, or another such one")
    if _CONSTANT in found and _CONSTANT not in ends:
        fact = f"{where}: the weights hold {_CONSTANT}, which vLLM adds and transformers does not"
        raise InputError(f"{fact}: remove it, as it moves all values alike")
    if (shape := found.get(_CONSTANT, (1,))) != (1,):
        fact = f"{where}: the constant of a value is one number, and {_CONSTANT} has the shape {list(shape)}"
        raise InputError(f"{fact}: take a folder that `ratchet export --critic` made")


def _tensors(folder: ModelFolder, name: str, size: int) -> dict[str, Shape]:
    """Names and shapes of the tensors in a file, after its header is compared with its size."""
    length = struct.unpack("<Q", folder.read(name, 0, _LENGTH))[0] if size >= _LENGTH else 0
    if not 0 < length <= min(size - _LENGTH, _LONGEST_HEADER):
        raise InputError(f"{folder}: {name} is not a safetensors file, or is cut off: copy the model again")
    try:
        header = json.loads(folder.read(name, _LENGTH, _LENGTH + length))
        tensors = {key: value for key, value in header.items() if key != "__metadata__"}
        ends = [value["data_offsets"][1] for value in tensors.values()]
        found = {key: tuple(map(int, value["shape"])) for key, value in tensors.items()}
        types = {key: value["dtype"] for key, value in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{folder}: the header of {name} is damaged ({error!r}): copy the model again") from None
    expected = _LENGTH + length + max(ends, default=0)
    if size != expected:
        raise InputError(f"{folder}: {name} has {size} bytes, but its header describes {expected}: copy it again")
    for tensor, kind in types.items():
        if kind not in _TYPES:
            raise InputError(f"{folder}: {tensor} in {name} is of type {kind}: use the model in bf16 or fp32")
    return found


def _compare(facts: Mapping[str, Any], found: Mapping[str, Shape], where: str) -> None:
    expected = dict(shapes({**facts, "tie_word_embeddings": False}))  # one that is tied may be there too
    for name, shape in expected.items():
        if name not in found and not (name == _HEAD and facts.get("tie_word_embeddings")):
            raise InputError(f"{where}: the weights lack {name}, which config.json asks for: {_REPAIR}")
        if found.get(name, shape) != shape:
            fact = f"has the shape {list(found[name])}, but config.json describes {list(shape)}"
            raise InputError(f"{where}: {name} {fact}: {_REPAIR}")
    layers = {name for name in found if name.startswith("model.layers.")}
    if more := sorted(layers - set(expected) - {name for name in layers if "rotary_emb" in name}):
        raise InputError(f"{where}: the weights hold {more[0]}, which config.json does not describe: {_REPAIR}")
