"""All checks of a model in their order."""

from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import InputError
from tasks.config.run import RunConfig
from tasks.data.generated import model_config
from tasks.data.models import ModelFolder, open_model
from tasks.model_checks import architectures
from tasks.model_checks.weights import check_weights
from trainer_core.config import Device, TrainerConfig, check_context, check_layout, experts_of
from trainer_core.effects import Unused, without_effect
from trainer_core.lora import check_targets
from trainer_core.platform import te_absent

Facts = Mapping[str, Any]  # content of a model's config.json

_TOKENIZER = "tokenizer_config.json"
_OF_ROUTERS = ("experts.auxiliary_loss", "experts.bias_update_rate")


def source_facts(config: RunConfig, device: Device) -> Facts:
    """Checked config.json of a new run's model. Raises InputError: it is not whole, or cannot be trained or served."""
    section = config.model
    if section.generate is not None:
        return model_config(section.generate)
    return folder_facts(open_model(section), device, section.accept)


def folder_facts(folder: ModelFolder, device: Device, accept: Sequence[str]) -> Facts:
    """Checked config.json of a model's folder; raises as `source_facts`."""
    there, facts = folder.files(), folder.document("config.json")
    architectures.check_architecture(facts, device, accept, str(folder))
    if _TOKENIZER in there and folder.document(_TOKENIZER).get("auto_map"):
        fact = f"{folder} brings a tokenizer with code of its own (auto_map in {_TOKENIZER}), which is not run"
        raise InputError(f"{fact}: use a model whose tokenizer transformers has")
    architectures.check_numbers(facts, str(folder))
    check_weights(folder, facts)
    return facts


def check_fit(config: RunConfig, facts: Facts, device: Device, where: str) -> None:
    """Raises InputError, naming the keys: the configuration does not fit the model, which messages call `where`."""
    architectures.check_numbers(facts, where)
    check_layout(config.train.parallel, facts)
    if config.train.lora is not None:
        architectures.check_export(facts, "train.lora", where)
        check_targets(config.train.lora, facts, experts_of(facts))
    if device == "cuda" and not te_absent.is_absent():
        check_context(config.train, True, config.device.deterministic)
        if config.train.parallel.context > 1:
            architectures.check_full_attention(facts, where)
    heads, parts = facts["num_attention_heads"], config.engine.tensor
    if config.retrain is None and heads % parts:
        fact = f"the attention heads of {where} ({heads}) cannot be divided by engine.tensor = {parts}"
        raise InputError(f"{fact}: choose a smaller one")
    if unused := without_effect(config.train, _without_experts(facts), "train."):
        raise InputError(f"{where}: {'; '.join(unused)}")
    architectures.check_head_size(facts, device, where)
    architectures.check_window(facts, config.train.max_length, where)
    context = int(facts["max_position_embeddings"])
    lengths = {"engine.max_model_len": config.engine.max_model_len, "train.max_length": config.train.max_length}
    for name, length in lengths.items():
        if length > context:
            raise InputError(f"{name} = {length} is longer than the model's context of {context} tokens: lower it")


def _without_experts(facts: Facts) -> list[Unused[TrainerConfig]]:
    """Settings of experts that have no effect on this model."""
    if not experts_of(facts):
        reason, names = "a model without experts", (*_OF_ROUTERS, "parallel.expert_tensor")
    elif architectures.architecture_of(facts, "") == "Qwen3MoeForCausalLM":
        reason, names = "a model whose routers have no biases", ("experts.bias_update_rate",)
    else:
        return []
    return [Unused(name, lambda _: reason) for name in names]
