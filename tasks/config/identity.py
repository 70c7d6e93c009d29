"""Settings that decide results: those of a run, whose digest is its identity, and those of each stage.

A finished stage stays done while settings change that it has not read. All follows from the marks of the keys."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from storage.digest import value_digest
from tasks.config.credentials import is_secret, shown
from tasks.config.keys import NONE, Models, decided, key_at, key_of, leaves_of
from tasks.config.run import RunConfig
from trainer_core.marks import Mark

Document = Mapping[str, JsonValue]  # a configuration, or a section of one, as plain JSON types
_ONCE = ("evaluate", "select", "rescore")
"""Stages that no stage of their run is made from, or whose inputs are of other runs."""

STAGES = frozenset(stage for _, key in leaves_of(RunConfig) for stage in key.mark.stages or ())
"""Stages whose result a setting decides."""
_LIMITS = ("rollout.max_tokens", "train.max_length")


def meaning(document: Document, stage: str | None = None) -> dict[str, JsonValue]:
    """The settings in `document` that decide the result of the run, or of a stage, without the folders of files."""
    return decided(document, (RunConfig,), stage, NONE)


def meaning_digest(document: Document) -> str:
    """Identity of `meaning`. A newer key, which the document lacks, does not affect it."""
    return value_digest(meaning(document))


def settings_digest(document: Document, stage: str) -> str:
    """Identity of the settings that decide the result of a stage."""
    return value_digest(leaves(meaning(document, stage)))


def changed_meaning(stored: Document, given: Document, prefix: str = "") -> list[str]:
    """The settings that differ, one line each with both values. Secrets are ignored: they may be rotated."""
    lines: list[str] = []
    for key in sorted({*stored, *given}):
        old, new = stored.get(key), given.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changed_meaning(old, new, f"{prefix}{key}.")
        elif not (is_secret(key) or _same(old, new)):
            started = f"{prefix}{key}: the run was started with {shown(old, key)!r}"
            lines.append(f"{started}, but is now given {shown(new, key)!r}")
    return lines


def is_runtime(key: str) -> bool:
    """True if `section.key` is a runtime setting, which may change whenever a run is continued."""
    return (found := key_at(RunConfig, key)) is not None and found.mark.stages == ()


def is_read(key: str, stage: str) -> bool:
    """True if the setting `section.key` decides the result of a stage."""
    return (found := key_at(RunConfig, key)) is not None and found.mark.read_by(stage)


def reads(stage: str) -> tuple[str, ...]:
    """The keys that decide the result of a stage; a section by its name if all of it does that decides any."""
    return tuple(_reads((RunConfig,), stage, NONE, ""))


def touches(key: str, stage: str) -> bool:
    """True if a stage reads anything of a setting, or of a whole section or document (empty), or is not known."""
    below = (one.mark for path, one in leaves_of(RunConfig) if path.startswith(f"{key}."))
    return not key or stage not in STAGES or is_read(key, stage) or any(mark.read_by(stage) for mark in below)


def fixed_by_prepare(config: RunConfig) -> tuple[str, ...]:
    """Settings, or whole sections, that iteration 0 fixes: a fork shares its results, so it cannot change them. Only
    the seed may be another: it decides the draws of later iterations too. Where prompts that leave no room for a
    response are dropped, the limits on lengths are fixed as well."""
    return (*_FIXED, *(_LIMITS if config.data.overlong == "drop" else ()))


def unchangeable(config: RunConfig, settings: Mapping[str, JsonValue], behind: Sequence[str]) -> list[str]:
    """Settings of a run that cannot change when a stage is done again: stages that are not `behind`, which holds the
    stage and those of the same iteration that are made from it, have read them."""
    before = [stage for stage in STAGES if stage not in (*behind, *_ONCE)]
    fixed = (*fixed_by_prepare(config), "engine")
    return [key for key in settings if key.startswith(fixed) or any(is_read(key, stage) for stage in before)]


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
    """The settings that make `before` equal `after`, by `section.key`. Keys left out at their default are not there."""
    kind = key_at(RunConfig, prefix.removesuffix("."))
    if set(before) != set(after) and prefix and (kind is None or len(kind.models) != 1):
        return {prefix.removesuffix("."): dict(after)}  # a table of another kind, as of another algorithm
    found: dict[str, JsonValue] = {}
    for name in dict.fromkeys((*after, *before)):
        key = key_at(RunConfig, f"{prefix}{name}")
        old, new = before.get(name), after.get(name, key and key.field.default)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            found[f"{prefix}{name}"] = new
    return found


def split_changes(before: Document, after: Document) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Changed settings by `section.key`: those that decide results, and the runtime settings."""
    changed = changed_settings(before, after)
    runtime = {key: value for key, value in changed.items() if is_runtime(key)}
    return {key: value for key, value in changed.items() if key not in runtime}, runtime


def with_settings(document: Document, settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of a document with settings replaced."""
    changed = dict(document)
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        inner = changed.get(section)
        changed[section] = with_settings(cast(Document, inner or {}), {rest: value}) if rest else value
    return changed


def _reads(models: Models, stage: str, above: Mark, prefix: str) -> Iterator[str]:
    for name in dict.fromkeys(name for model in models for name in model.model_fields):
        key = key_of(models, name, above)
        assert key is not None
        inner = [one.mark for model in key.models for _, one in leaves_of(model, key.below)] or [key.mark]
        if key.mark.read_by(stage) and all(mark.read_by(stage) for mark in inner if mark.stages):
            yield f"{prefix}{name}"
        else:
            yield from _reads(key.models, stage, key.below, f"{prefix}{name}.")


def _same(old: JsonValue, new: JsonValue) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    return not changed_meaning(old, new) if isinstance(old, dict) and isinstance(new, dict) else old == new


# the weight sync of iteration 0 has recorded digests of sums, or of adapters; a state is loaded in its own precision
_FIXED = ("engine.adapter", "train.precision", *(name for name in reads("prepare") if name != "run.seed"))
