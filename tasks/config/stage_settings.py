"""Which settings each stage reads: a finished stage stays done while others change.

The table names stages as they are stored. A key that decides results is read by at least one stage.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from storage.digest import value_digest
from tasks.config.identity import FIXED_BY_PREPARE, Document, is_runtime, meaning

READS: Mapping[str, tuple[str, ...]] = {
    "prepare": ("run.seed", "model", "data", "warmup", "rollout.stop_tokens", "rollout.special_tokens"),
    "rollout": ("run.seed", "data", "rollout", "engine.precision"),
    "reward": ("reward",),
    "select": ("retrain", "train.policy", "train.max_length"),
    "rescore": ("reward",),
    "train": ("run.seed", "model", "warmup", "rollout.temperature", "train", "retrain"),
    "weight-sync": ("engine.precision",),
    "evaluate": ("rollout.max_tokens", "rollout.stop_tokens", "rollout.special_tokens", "reward", "engine.precision"),
}
"""Keys, or whole sections, by stage. What reaches a stage in its inputs is not named again."""

_NOT_REPEATED = ("evaluate", "select", "rescore")  # nothing is made from the first, the others are of other runs


def settings_digest(document: Document, stage: str) -> str:
    """Identity of the settings that decide the result of a stage."""
    decides = leaves(meaning(document))
    return value_digest({key: value for key, value in decides.items() if is_read(key, stage)})


def unchangeable(settings: Mapping[str, JsonValue], behind: Sequence[str]) -> list[str]:
    """Settings that cannot change when a stage is done again: stages that are not behind it have read them.

    Args:
        behind: the stage, and those of the same iteration that are made from it.
    """
    before = [stage for stage in READS if stage not in (*behind, *_NOT_REPEATED)]
    fixed = (*FIXED_BY_PREPARE, "engine")
    return [key for key in settings if key.startswith(fixed) or any(is_read(key, stage) for stage in before)]


def is_read(key: str, stage: str) -> bool:
    """Whether a stage reads the setting `section.key`."""
    return any(key == name or key.startswith(f"{name}.") for name in READS[stage])


def touches(key: str, stage: str) -> bool:
    """Whether a stage reads anything of a setting, or of a whole section or document (empty)."""
    below = any(name.startswith(f"{key}.") for name in READS.get(stage, ()))
    return not key or stage not in READS or below or is_read(key, stage)


def leaves(document: Document, prefix: str = "") -> dict[str, JsonValue]:
    """The settings of a document by `section.key`."""
    found: dict[str, JsonValue] = {}
    for name, value in document.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def changed_settings(before: Document, after: Document, prefix: str = "") -> dict[str, JsonValue]:
    """What must be set in `before` to make it equal `after`, by `section.key`."""
    if set(before) != set(after):  # a table of another kind, as of another algorithm, is replaced as a whole
        return {prefix.removesuffix("."): dict(after)}
    found: dict[str, JsonValue] = {}
    for name, new in after.items():
        old = before[name]
        if isinstance(old, dict) and isinstance(new, dict):
            found |= changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            found[f"{prefix}{name}"] = new
    return found


def decided(before: Document, after: Document) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """What has changed, by `section.key`: the settings that decide results, and the runtime settings."""
    changed = changed_settings(before, after)
    runtime = {key: value for key, value in changed.items() if is_runtime(key.split("."))}
    return {key: value for key, value in changed.items() if key not in runtime}, runtime


def with_settings(document: Document, settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of a document with settings replaced."""
    changed = dict(document)
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        inner = changed.get(section)
        changed[section] = with_settings(cast(Document, inner or {}), {rest: value}) if rest else value
    return changed
