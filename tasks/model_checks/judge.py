"""Checks of the model that judges on an engine of the run, before anything expensive starts."""

from collections.abc import Callable

from storage.errors import InputError
from tasks.config.others import KEYS, other_model
from tasks.config.run import RunConfig
from tasks.data.backends import Backend
from tasks.data.models import open_model
from tasks.data.tokenizer import TextCodec
from tasks.model_checks import architectures
from tasks.model_checks.fitness import Facts, classifier_facts, folder_facts
from tasks.model_checks.objective import check_tokens
from trainer_core.config import Device, is_classifier


def check_judge(config: RunConfig, own: Facts, tokens: Callable[[], Backend], device: Device) -> None:
    """Refuse a model that an engine cannot serve, or that cannot be asked: a chat model that judges, or a reward model,
    which scores the tokens of the model with the config.json `own` and the tokenizer that `tokens` reads. Without one
    nothing is checked. Raises InputError."""
    section = other_model(config, "judge")
    if section is None or config.engines is None:
        return
    folder, longest = open_model(section, KEYS["judge"]), config.engines.judge.max_model_len
    scores = is_classifier(folder.config())
    facts = (classifier_facts if scores else folder_facts)(folder, device, section.accept)
    architectures.check_head_size(facts, device, str(folder))
    if (context := int(facts["max_position_embeddings"])) < longest:
        fact = f"{folder} has a context of {context} tokens, but engines.judge.max_model_len is {longest}"
        raise InputError(f"{fact}: lower it, or choose another model")
    if scores:
        _check_reach(config, longest)
        check_tokens(folder, facts, own, tokens(), "reward model")
    elif not folder.with_texts(TextCodec.from_directory).has_template:
        fact = f"the tokenizer of {folder} has no chat template, and a judge is asked by messages"
        raise InputError(f"{fact}: choose a chat model")


def judge_facts(config: RunConfig) -> Facts | None:
    """Content of a judge's config.json, unchecked; None without one. Raises InputError: it cannot be read."""
    section = other_model(config, "judge")
    return None if section is None else open_model(section, KEYS["judge"]).config()


def _check_reach(config: RunConfig, longest: int) -> None:
    if config.retrain is None and longest < (sampled := config.engine.max_model_len):
        fact = f"engine.max_model_len = {sampled} lets samples grow beyond engines.judge.max_model_len = {longest}"
        raise InputError(f"{fact}, and the reward model has no score for these: raise it to {sampled}")
