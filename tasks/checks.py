"""Checks of a run that are made before anything expensive starts."""

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from storage.backends.root import Root
from storage.errors import InputError
from tasks.config.credentials import check_root_url
from tasks.config.environment import Settings, resolve, without_secrets
from tasks.config.model import GeneratedModel
from tasks.config.run import RunConfig
from tasks.data.sources import prompt_tables, text_codec
from tasks.rewards.resolve import resolve_reward
from trainer_core.config import check_layout


def check_config(config: RunConfig, root: Root) -> None:
    """Refuse a run that cannot work. A second call in the same process reads and tokenizes nothing again.

    Raises:
        InputError: the layout does not fit the model, a data set or the reward cannot be used, sizes contradict
            each other, CUDA is requested but not available, or the root's URL has credentials.
        StorageUnavailable: the root cannot be written.
    """
    check_root_url(root.url)
    root.check_writable()
    Settings.from_environment().device(config.device.kind)
    _check_content(config.model_dump_json())


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _check_content(document: str) -> None:
    config = RunConfig.model_validate_json(document)
    check_layout(config.train.parallel, model_facts(config))
    resolve_reward(config.reward.function, config.reward.arguments)
    _check_sizes(config)
    tables = prompt_tables(config, text_codec(config.model))
    if config.warmup.steps and (
        "warmup" not in tables or tables["warmup"]["answer"].null_count == len(tables["warmup"])
    ):
        raise InputError(
            "warmup.steps is above 0, but there are no solved examples: set data.warmup, or warmup.steps = 0"
        )
    if config.evaluate.every and "held_out" not in tables:
        raise InputError(
            "evaluate.every is above 0, but there are no held-out prompts: set data.held_out, or evaluate.every = 0"
        )


def model_facts(config: RunConfig) -> Mapping[str, Any]:
    """The fields of the model's config.json, from its directory or as the model is to be generated.

    Raises:
        InputError: the directory has no readable config.json.
    """
    if config.model.generate is not None:
        return _generated_facts(config.model.generate)
    url = f"{config.model.source}/config.json"
    try:
        with fsspec.open(f"{resolve(config.model.source, 'model.source')}/config.json", "rb") as file:
            return json.loads(file.read())  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ImportError, ValueError) as error:
        raise InputError(
            f"model.source: {url} cannot be read ({without_secrets(str(error))}): give a Hugging Face directory"
        ) from None


def check_scratch(folder: Path | None = None) -> None:
    """Refuse a temporary folder that cannot be written.

    Raises:
        InputError: naming the folder.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(
            f"temporary folder {folder or tempfile.gettempdir()}: {error}. Set TMPDIR to another folder"
        ) from None


def _generated_facts(model: GeneratedModel) -> dict[str, int]:
    return {
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.max_positions,
        "vocab_size": model.vocabulary,
    }


def _check_sizes(config: RunConfig) -> None:
    samples = config.rollout.prompts * config.rollout.samples
    updates = config.train.policy.mini_batches
    if samples < updates:
        raise InputError(
            f"{samples} samples per iteration cannot be split into train.policy.mini_batches = {updates}: "
            "lower it, or raise rollout.prompts or rollout.samples"
        )
    context = int(model_facts(config)["max_position_embeddings"])
    for name, length in (
        ("engine.max_model_len", config.engine.max_model_len),
        ("train.max_length", config.train.max_length),
    ):
        if length > context:
            raise InputError(f"{name} = {length} is longer than the model's context of {context} tokens: lower it")
    if config.train.max_length < config.engine.max_model_len:
        raise InputError(
            f"engine.max_model_len = {config.engine.max_model_len} lets responses grow beyond train.max_length = "
            f"{config.train.max_length}: make them equal"
        )
