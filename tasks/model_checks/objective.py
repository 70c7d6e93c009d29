"""Checks of code of the user's own, and of models beside the one that is trained: teacher, critic and judge."""

import functools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

from storage.errors import InputError, told
from tasks.config.environment import scoring_environment
from tasks.config.others import KEYS, Other, other_model
from tasks.config.run import EngineSection, RunConfig
from tasks.data.backends import Backend, read_backend
from tasks.data.models import ModelFolder, count_parameters, open_model
from tasks.data.tokenizer import TextCodec
from tasks.model_checks import architectures
from tasks.model_checks.fitness import Facts, classifier_facts, folder_facts
from trainer_core.config import Device, check_layout, is_classifier
from trainer_core.objectives.objective_config import PolicyConfig

_DEADLINE_S = 300


def check_objective(policy: PolicyConfig) -> None:
    """Try code of the user's own on a few tokens, in a process of its own; built-in objectives need no trial. Raises
    InputError: it cannot be imported or called, or returns something unusable."""
    if policy.runs_user_code:
        _tried("trainer_core.objectives.trial", policy.model_dump_json(), "objective in train.policy")


def check_engine(section: EngineSection) -> None:
    """Import an engine of the user's own in a process of its own, and compare it with `EngineProtocol`. Raises
    InputError: it cannot be imported, or lacks a method."""
    if section.function is not None:
        table = section.model_dump_json(include={"function", "source"})
        _tried("tasks.engine.own", table, "engine in engine.function")


@functools.lru_cache(maxsize=2)  # the command line and the flow both check; a refusal is not cached
def _tried(program: str, document: str, what: str) -> None:
    command = [sys.executable, "-P", "-m", program]
    try:
        found = subprocess.run(
            command, input=document, capture_output=True, text=True, timeout=_DEADLINE_S, env=scoring_environment([])
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the trial of the {what} did not end within {_DEADLINE_S} s: correct its function") from None
    if found.returncode:
        said = found.stderr.strip()[-1000:] or "it has written nothing"
        raise InputError(f"the code of the {what} ended its trial with exit code {found.returncode}: {said}")
    if found.stdout:
        raise InputError(f"{found.stdout}. Nothing was started: correct it, or name another")


def check_teacher(config: RunConfig, own: Facts, tokens: Callable[[], Backend], device: Device) -> None:
    """Refuse a teacher that cannot score the samples of the model with the config.json `own` and the tokenizer that
    `tokens` reads. Without a teacher nothing is checked. Raises InputError."""
    distill = config.train.policy.distill
    if distill is not None and distill.top_k >= own["vocab_size"]:
        fact = f"train.policy.distill.top_k = {distill.top_k} leaves none of the model's {own['vocab_size']} tokens"
        raise InputError(f"{fact} for the rest: lower it")
    check_beside(config, own, tokens, device, "teacher")


def check_beside(
    config: RunConfig, own: Facts, tokens: Callable[[], Backend], device: Device, kind: Literal["teacher", "critic"]
) -> None:
    """Refuse a model that cannot read such samples in the trainer's layout. Without one, as of a critic that begins
    with the policy, nothing is checked. Raises InputError."""
    if (section := other_model(config, kind)) is None:
        return
    folder = open_model(section, KEYS[kind])
    gives_values = kind == "critic" and is_classifier(folder.config())
    checked = partial(classifier_facts, constant=True) if gives_values else folder_facts
    facts = checked(folder, device, section.accept)
    architectures.check_head_size(facts, device, str(folder))
    architectures.check_window(facts, config.train.max_length, str(folder))
    try:
        check_layout(config.train.parallel, facts)
    except InputError as error:
        raise InputError(f"{folder}: {told(error)}") from None
    context, longest = int(facts["max_position_embeddings"]), config.train.max_length
    if context < longest:
        fact = f"{folder} has a context of {context} tokens, but train.max_length is {longest}"
        raise InputError(f"{fact}: lower it, or choose another {kind}")
    check_tokens(folder, facts, own, tokens(), kind)


def other_parameters(config: RunConfig, kind: Other) -> int:
    """The number of weights of another model of the run, or 0. Raises InputError: its files cannot be listed."""
    if (section := other_model(config, kind)) is None:
        return 0
    return count_parameters(section, open_model(section, KEYS[kind]).document("config.json"))


def check_tokens(folder: ModelFolder, facts: Facts, own: Facts, tokens: Backend, kind: str) -> None:
    """Refuse a model of this `kind` that has fewer tokens than the model with the config.json `own`, or reads others.
    Raises InputError, with the first one."""
    if facts["vocab_size"] < own["vocab_size"]:
        fact = f"{folder} has {facts['vocab_size']} tokens, but the model, which samples them, {own['vocab_size']}"
        raise InputError(f"{fact}: choose a {kind} with as many")
    theirs = folder.with_texts(read_backend)
    for token in range(max(tokens.size, theirs.size)):
        if (known := tokens.token_text(token)) != (other := theirs.token_text(token)):
            raise InputError(
                f"{folder} has another tokenizer than the model: token {token} is {known!r} for the model, and "
                f"{other!r} for the {kind}, which would read other texts. Choose a {kind} with the model's tokenizer"
            )


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
        if config.retrain is None and longest < (sampled := config.engine.max_model_len):
            fact = f"engine.max_model_len = {sampled} lets samples grow beyond engines.judge.max_model_len = {longest}"
            raise InputError(f"{fact}, and the reward model has no score for these: raise it to {sampled}")
        check_tokens(folder, facts, own, tokens(), "reward model")
    elif not folder.with_texts(TextCodec.from_directory).has_template:
        fact = f"the tokenizer of {folder} has no chat template, and a judge is asked by messages"
        raise InputError(f"{fact}: choose a chat model")


def judge_facts(config: RunConfig) -> Facts | None:
    """Content of a judge's config.json, unchecked; None without one. Raises InputError: it cannot be read."""
    section = other_model(config, "judge")
    return None if section is None else open_model(section, KEYS["judge"]).config()
