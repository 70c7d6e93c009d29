"""Checks of a run's environment before anything expensive starts."""

import functools

from storage.errors import InputError
from tasks.config.reward import EnvironmentSection
from tasks.config.run import RunConfig
from tasks.environments.hosting import Host

_OF_CLIENTS = ("model", "sampling", "tool_parser", "reasoning_parser")


def check_environment(config: RunConfig) -> None:
    """Refuse an environment that cannot be used: its class is imported, and made once, in a process of its own. Raises
    InputError: naming the setting and the reason."""
    assert config.environment is not None
    if config.retrain is not None:
        raise InputError("[environment] has no effect on stored samples, which [retrain] trains on: leave it out")
    most, context = config.environment.tokens, config.engine.max_model_len
    if most is not None and most >= context:
        fact = f"environment.tokens = {most} is not a limit, since engine.max_model_len = {context} ends conversations"
        raise InputError(f"{fact} before: lower it, or leave it out")
    _check(config.environment.model_dump_json())


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _check(document: str) -> None:
    section = EnvironmentSection.model_validate_json(document)
    with Host(section) as host:
        for name in _OF_CLIENTS:
            if (
                not (host.drives or (host.reads and name.endswith("parser")))
                and vars(section)[name] != EnvironmentSection.model_fields[name].default
            ):
                fact = f"environment.{name} = {vars(section)[name]!r} is for clients of a function `drive`"
                raise InputError(f"{fact}, but {section.function!r} is a class: leave it out")
    if section.reasoning_parser and section.tool_parser == "tags":
        fact = f"environment.reasoning_parser = {section.reasoning_parser!r} is read by vLLM"
        raise InputError(
            f"{fact}, but tool_parser is 'tags', which reads both: name a tool parser of vLLM, or leave it"
        )
