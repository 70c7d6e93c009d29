"""Check that trainer and engine compute the model of config.json: they obey each key, or it has no effect."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from storage.errors import InputError
from tasks.model_checks.keys import KEYS, ROPE, WITHOUT_EFFECT, Obeyed, Table

_ROPE_NAMES = ("rope_scaling", "rope_parameters")  # transformers takes the first if both are given
_TYPE_NAMES = ("rope_type", "type")


def check_keys(facts: Table, architecture: str, accepted: Sequence[str], where: str) -> None:
    """Refuse a config.json with a key or a value that changes the model and that trainer or engine ignores. `facts` is
    its content, `accepted` the keys of `model.accept`, which pass, and `where` the model's name in messages. Raises
    InputError: naming each such key with its value, or keys that are accepted without need."""
    found = dict(_refused(facts, architecture))
    if problems := [text for key, text in found.items() if key not in accepted]:
        keys = [key for key in found if key not in accepted]
        raise InputError(
            f"{where}: {'; '.join(problems)}. Trainer and engine would compute another model than transformers: use a "
            "model without it, or, if you know better, let it pass with model.accept = "
            f"{json.dumps([*accepted, *keys])}"
        )
    if needless := sorted(set(accepted) - found.keys()):
        fact = f"{where}: model.accept names {needless[0]}, which has no effect"
        raise InputError(f"{fact}, because nothing of that name is refused: leave it out")


def _refused(facts: Table, architecture: str) -> Iterator[tuple[str, str]]:
    """Disobeyed keys with their reasons."""
    if architecture not in KEYS:
        yield (
            "architectures",
            f"it is not known which keys of config.json trainer and engine obey for architectures = {architecture}, "
            f"only for {', '.join(sorted(KEYS))}",
        )
        return
    known = KEYS[architecture]
    yield from _disobeyed(facts, known, architecture, "", {*WITHOUT_EFFECT, *_ROPE_NAMES})
    if architecture == "DeepseekV3ForCausalLM" and not {"num_nextn_predict_layers", "num_mtp_layers"} & facts.keys():
        text = "num_nextn_predict_layers is not in config.json, and transformers then has 1: set it to 0"
        yield "num_nextn_predict_layers", text
    yield from _disobeyed_positions(facts, architecture)


def _disobeyed(
    table: Table, known: Mapping[str, Obeyed], owner: str, prefix: str, others: set[str]
) -> Iterator[tuple[str, str]]:
    """Keys of a table that are unknown, have another value, or are missing."""
    for key, value in table.items():
        shown = f"{prefix}{key} = {json.dumps(value)} in config.json"
        if key in known:
            if not known[key].holds(value, table):
                yield f"{prefix}{key}", f"{shown} is not supported for {owner}, only {known[key].words}"
        elif key not in others:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" (did you mean {prefix}{near[0]}?)" if near else ""
            yield f"{prefix}{key}", f"{shown} is not known for {owner}{hint}"
    for key, one in known.items():
        if one.absent is not None and key not in table:
            text = f"{prefix}{key} is not in config.json, and {one.absent}: write {one.words} there"
            yield f"{prefix}{key}", text


def _disobeyed_positions(facts: Table, architecture: str) -> Iterator[tuple[str, str]]:
    """Disobeyed parameters of rotary positions, in each of their spellings."""
    given = {name: facts[name] for name in _ROPE_NAMES if facts.get(name) not in (None, {})}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            yield name, f"{name} = {json.dumps(rope)} in config.json is not a table"
            return
    if len(given) == len(_ROPE_NAMES) and given["rope_scaling"] != given["rope_parameters"]:
        yield "rope_scaling", "rope_scaling and rope_parameters in config.json say different things: leave one out"
    for name, rope in given.items():
        yield from _disobeyed_rope(name, rope, facts, architecture)


def _disobeyed_rope(name: str, rope: Table, facts: Table, architecture: str) -> Iterator[tuple[str, str]]:
    kinds = [rope[key] for key in _TYPE_NAMES if key in rope] or ["default"]
    spelling = next((key for key in _TYPE_NAMES if key in rope), _TYPE_NAMES[0])
    tables = ROPE[architecture]
    if any(kind != kinds[0] for kind in kinds):
        yield f"{name}.type", f"{name}.rope_type = {json.dumps(kinds[0])} and .type = {json.dumps(kinds[1])} differ"
    elif kinds[0] not in tables:
        text = f"{name}.{spelling} = {json.dumps(kinds[0])} in config.json is not supported for {architecture}"
        yield f"{name}.{spelling}", f"{text}, only {' or '.join(map(json.dumps, sorted(tables)))}"
    else:
        owner = f"{architecture} with {spelling} = {json.dumps(kinds[0])}"
        yield from _disobeyed(rope, tables[kinds[0]], owner, f"{name}.", {*_TYPE_NAMES})
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and key in facts and rope[key] != facts[key]:
            values: tuple[Any, Any] = facts[key], rope[key]
            yield key, f"{key} = {json.dumps(values[0])} and {name}.{key} = {json.dumps(values[1])} differ"
