"""Which part of a configuration decides a run's result, and the digest of that part.

The rules carry a number that is stored with each run. What was recorded keeps its identity under the rules of its own
version; whether a run may be continued with a given configuration is decided under the current ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from storage.digest import value_digest
from tasks.config.credentials import MASK, is_secret, referenced, shown
from trainer_core.user_code import without_folder

Document = Mapping[str, JsonValue]
"""A configuration, or a section of one, as plain JSON types."""

_SOURCES: dict[str, Any] = {"source": True, "subset": True, "split": True, "format": True}
"""Of the tables of a list of sources: where the content is and in which form; what it is, `prepare` records."""

_RUNTIME_1: dict[str, Any] = {
    "run": {"name": True, "iterations": True},
    "engine": True,
    "device": True,
    "storage": True,
    "evaluate": True,
    "model": {"source": True},
    "data": {"train": _SOURCES, "held_out": _SOURCES, "warmup": _SOURCES},
    "train": {"parallel": True, "micro_batch_size": True},
    "reward": {"deadline_s": True, "processes": True},
    "rollout": {"groups_per_part": True},
}
_RUNTIME_2 = {
    **_RUNTIME_1,
    "run": {**_RUNTIME_1["run"], "retries": True, "outage_s": True},
    # the probe and its limits decide whether a sync is accepted, not what it delivers
    "sync": True,
    "workers": True,
    "report": True,
    "model": {"source": True, "download": True, "token": True, "accept": True},
    "data": {**_RUNTIME_1["data"], "download": True},
    "train": {
        "parallel": True,
        "megatron": True,
        "memory": True,
        "micro_batch_size": True,
        "micro_batch_tokens": True,
        "policy": {"kl_sample": True},
    },
    "reward": {**_RUNTIME_1["reward"], "start_deadline_s": True, "max_failures": True, "try": True},
}
# the engine's precision decides what is sampled
_RUNTIME_3 = {
    **_RUNTIME_2,
    "engine": dict.fromkeys(
        (
            "count",
            "tensor",
            "cards",
            "max_model_len",
            "max_num_seqs",
            "kv_cache_mib",
            "gpu_memory_utilization",
            "cuda_graphs",
            "async_scheduling",
            "sleep",
            "own_process",
        ),
        True,
    ),
}

_RUNTIME: Mapping[int, Mapping[str, Any]] = {1: _RUNTIME_1, 2: _RUNTIME_2, 3: _RUNTIME_3}
"""The runtime settings, which decide no result, by version of the rules. An entry only ever gains keys."""

FIXED_BY_PREPARE = ("model", "data", "warmup", "rollout.stop_tokens", "rollout.special_tokens")
"""Settings, or whole sections, that iteration 0 fixes: a fork shares what they have made, so it cannot change them."""

RULES = max(_RUNTIME)
"""The current rules."""
FIRST_RULES = min(_RUNTIME)
"""The rules of records that name none."""


def meaning(document: Document, rules: int = RULES) -> dict[str, JsonValue]:
    """The keys in `document` that decide the result: all but the runtime settings, and without the folders of files."""
    reward = document.get("reward")
    placeless = {**document, "reward": _placeless(reward)} if isinstance(reward, dict) else document
    return _without(placeless, _RUNTIME[rules])


def meaning_digest(document: Document, rules: int = RULES) -> str:
    """Identity of `meaning`. A newer key, which the document lacks, does not affect it."""
    return value_digest(meaning(document, rules))


def changed_meaning(stored: Document, given: Document, prefix: str = "") -> list[str]:
    """The settings that differ, one line each with both values. Secrets are ignored: they may be rotated."""
    lines: list[str] = []
    for key in sorted({*stored, *given}):
        old, new = stored.get(key), given.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changed_meaning(old, new, f"{prefix}{key}.")
        elif not (is_secret(key) or _same(old, new)):
            lines.append(
                f"{prefix}{key}: the run was started with {shown(old, key)!r}, but is now given {shown(new, key)!r}"
            )
    return lines


def is_runtime(path: Sequence[str]) -> bool:
    """Whether the key at `path` is a runtime setting, which may change whenever a run is continued."""
    rules: Any = _RUNTIME[RULES]
    for name in path:
        rules = rules.get(name, {})
        if rules is True:
            return True
    return rules is _SOURCES


def _placeless(reward: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """`[reward]`, or one of its functions, without the folders of functions."""
    named, several = reward.get("function"), reward.get("functions")
    found = dict(reward)
    if isinstance(named, str):
        found["function"] = without_folder(named)
    if isinstance(several, list):
        found["functions"] = [_placeless(one) if isinstance(one, dict) else one for one in several]
    return found


def _same(old: JsonValue, new: JsonValue) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return not changed_meaning(old, new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    # a URL whose credentials an earlier version recorded is given by reference now
    return old == new or (referenced(new) is not None and isinstance(old, str) and MASK in old)


def _without(document: Document, runtime: Mapping[str, Any]) -> dict[str, JsonValue]:
    kept: dict[str, JsonValue] = {}
    for key, value in document.items():
        rule = runtime.get(key)
        if rule is _SOURCES:
            if isinstance(value, list):
                kept[key] = [_without(one, _SOURCES) if isinstance(one, dict) else one for one in value]
        elif rule is not True:
            kept[key] = _without(value, rule) if rule and isinstance(value, dict) else value
    return kept
