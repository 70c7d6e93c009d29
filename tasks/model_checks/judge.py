"""Checks of the model that judges on an engine of the run, before anything expensive starts."""

from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.config.model import JUDGE_KEY, judge_section
from tasks.config.run import RunConfig
from tasks.data.hub import TEXT_FILES
from tasks.data.models import ModelFolder, count_parameters, open_model
from tasks.data.tokenizer import TextCodec
from tasks.model_checks import architectures
from tasks.model_checks.fitness import folder_facts
from trainer_core.config import Device


def check_judge(config: RunConfig, device: Device) -> None:
    """Refuse a model that an engine cannot serve, or that cannot be asked. Without one nothing is checked. Raises
    InputError."""
    section = judge_section(config.model, config.engines)
    if section is None or config.engines is None:
        return
    folder, longest = open_model(section, JUDGE_KEY), config.engines.judge.max_model_len
    facts = folder_facts(folder, device, section.accept)
    architectures.check_head_size(facts, device, str(folder))
    if (context := int(facts["max_position_embeddings"])) < longest:
        fact = f"{folder} has a context of {context} tokens, but engines.judge.max_model_len is {longest}"
        raise InputError(f"{fact}: lower it, or choose another judge")
    if not _codec(folder).has_template:
        fact = f"the tokenizer of {folder} has no chat template, and a judge is asked by messages"
        raise InputError(f"{fact}: choose a chat model")


def judge_parameters(config: RunConfig) -> int:
    """The number of a judge's weights; 0 without one. Raises InputError: its files cannot be listed."""
    if (section := judge_section(config.model, config.engines)) is None:
        return 0
    return count_parameters(section, open_model(section, JUDGE_KEY).document("config.json"))


def _codec(folder: ModelFolder) -> TextCodec:
    with scratch() as directory:
        for name in set(folder.files()) & set(TEXT_FILES):
            folder.fetch(name, directory / name)
        return TextCodec.from_directory(directory)
