"""Checks of a teacher: it must fit the layout, and know the same tokens as the model that is trained."""

from collections.abc import Callable

from storage.errors import InputError, told
from storage.ownership.scratch import scratch
from tasks.config.model import TEACHER_KEY, teacher_section
from tasks.config.run import RunConfig
from tasks.data.backends import Backend, read_backend
from tasks.data.hub import TEXT_FILES
from tasks.data.models import ModelFolder, open_model
from tasks.model_checks import architectures
from tasks.model_checks.fitness import Facts, folder_facts
from trainer_core.config import Device, check_layout


def check_teacher(config: RunConfig, own: Facts, tokens: Callable[[], Backend], device: Device) -> None:
    """Refuse a teacher that cannot score the samples of the model with the config.json `own` and the tokenizer that
    `tokens` reads. Without a teacher nothing is checked. Raises InputError."""
    if (section := teacher_section(config.model, config.train.policy.distill)) is None:
        return
    folder = open_model(section, TEACHER_KEY)
    facts = folder_facts(folder, device, section.accept)
    architectures.check_head_size(facts, device, str(folder))
    architectures.check_window(facts, config.train.max_length, str(folder))
    try:
        check_layout(config.train.parallel, facts)
    except InputError as error:
        raise InputError(f"{folder}: {told(error)}") from None
    context, longest = int(facts["max_position_embeddings"]), config.train.max_length
    if context < longest:
        fact = f"{folder} has a context of {context} tokens, but train.max_length is {longest}"
        raise InputError(f"{fact}: lower it, or choose another teacher")
    if facts["vocab_size"] < own["vocab_size"]:
        fact = f"{folder} has {facts['vocab_size']} tokens, but the model, which samples them, {own['vocab_size']}"
        raise InputError(f"{fact}: choose a teacher with as many")
    _check_tokens(folder, tokens())


def _check_tokens(folder: ModelFolder, tokens: Backend) -> None:
    with scratch() as directory:
        for name in set(folder.files()) & set(TEXT_FILES):
            folder.fetch(name, directory / name)
        theirs = read_backend(directory)
    for token in range(max(tokens.size, theirs.size)):
        if (own := tokens.token_text(token)) != (other := theirs.token_text(token)):
            raise InputError(
                f"{folder} has another tokenizer than the model: token {token} is {own!r} for the model, and {other!r} "
                "for the teacher, whose probabilities would be those of other texts. Choose a teacher with the model's "
                "tokenizer"
            )
