"""The document that defines a run: TOML in, frozen models out, all errors in one message; and as TOML again."""

import difflib
import glob
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from pydantic import ValidationError

from storage.backends.objects import url_errors
from storage.errors import InputError
from tasks.config.credentials import referenced, shown, shown_setting, shown_text
from tasks.config.keys import NONE, Models, models_in, placed, type_of
from tasks.config.run import ENGINES, SWITCHED, RunConfig
from trainer_core.marks import Mark
from trainer_core.objectives.user_config import GROUP, OBJECTIVE_TABLES, found_code
from trainer_core.user_code import located_function

_NEAR = 0.5  # from which similarity a key counts as a misspelling: "keep" of "keep_every", not "lr" of "learning_rate"
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FORMS = ("text", "list")  # names of the forms that a setting may have, which pydantic puts into the place of an error


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (any fsspec URL) and apply `section.key=value` overrides; names of local files become absolute.
    Raises InputError: the file cannot be read or parsed, a key is unknown, or a value cannot be used."""
    path = os.fspath(path)
    return completed(read_document(path), overrides, folder_of(path), path)


def load_changes(path: str) -> dict[str, Any]:
    """The tables of a TOML file that holds only some of a configuration; names of local files become absolute. Raises
    InputError: the file cannot be read or parsed."""
    return _located(read_document(path), folder_of(path))


def merged(document: Mapping[str, Any], changes: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`document` with the values of `changes`; tables are merged key by key, unless one gets another `type`. A 0 that
    switches something off removes its settings."""
    result = dict(document)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("type") in (None, old.get("type")):
            result[key] = merged(old, value, f"{path}{key}.")
        else:
            result[key] = value
        for name in _off(f"{path}{key}", value) - changes.keys():
            result.pop(name, None)
    return result


def _off(path: str, value: Any) -> set[str]:
    """The other keys of a table that `path = value` switches off."""
    return {name.rpartition(".")[2] for name in SWITCHED.get(path, ())} if value == 0 else set()


def without_blanks(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of tables that have a value: a form gives None, or an empty table, for what it leaves alone."""
    found = {key: without_blanks(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
    return {key: value for key, value in found.items() if value not in (None, {})}


def read_document(path: str) -> dict[str, Any]:
    """The content of a TOML file (any fsspec URL). Raises InputError: it cannot be read or parsed."""
    try:
        with fsspec.open(path, "rb") as file:
            return tomllib.loads(file.read().decode())  # pyright: ignore[reportAttributeAccessIssue]
    except FileNotFoundError:
        raise InputError(f"configuration {shown_text(path)} does not exist: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"configuration {shown_text(path)} is not valid TOML: {error}") from None
    except url_errors(path) as error:
        raise InputError(f"configuration {shown_text(path)} cannot be read: {shown_text(str(error))}") from None


def completed(document: dict[str, Any], overrides: Sequence[str], folder: Path | None, where: str) -> RunConfig:
    """A configuration of a parsed document, into which overrides and absolute paths of local files are put; `folder` is
    that of the configuration, if it is a local file. Raises InputError: as `parse_config`."""
    apply_overrides(document, overrides)
    return parse_config(_located(document, folder), where)


def parse_config(document: Mapping[str, Any], where: str) -> RunConfig:
    """Validate a parsed document. Raises InputError: all errors, one per line."""
    try:
        json.dumps(document, ensure_ascii=False, default=str).encode()
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise InputError(f"configuration {shown_text(where)} cannot be used:\n{explained(error)}") from None
    except UnicodeEncodeError as error:  # a file's name, or a --set, in another encoding
        text = shown_text(error.object[: error.end].rpartition('"')[2])
        fact = f"configuration {shown_text(where)} cannot be used: {text!r} in it is not UTF-8"
        raise InputError(f"{fact}, so it cannot be recorded. Rename the file, or correct the text") from None


def explained(error: ValidationError) -> str:
    """Flaws of a configuration, one line each, without the secrets in it."""
    flaws: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    bad = {flaw["loc"][:-1] for flaw in flaws}  # pydantic counts what is left of a list without its bad elements
    return "\n".join(f"  {_explain(one)}" for one in flaws if one["type"] != "too_short" or one["loc"] not in bad)


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put each `section.key=value` into a parsed document, first those that decide which other keys there may be.
    Raises InputError: as `apply_override`."""
    several = [overrides] if isinstance(overrides, str) else overrides  # a text is a sequence, of characters
    paths = {given: given.partition("=")[0].strip() for given in several}
    for override in sorted(several, key=lambda one: not (paths[one].endswith(".type") or paths[one] in SWITCHED)):
        apply_override(document, override)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into a parsed document. Another type of a table removes the keys of the one it had, and a
    0 that switches something off its settings. Raises InputError: it has another form, or has a value as a section."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {shown_setting(override)!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word: --set reward.function=regex
    table = document
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {shown_setting(override)!r}: {key!r} is a value, not a section")
    if keys[-1] == "type" and table.get("type") != value and len(_models_at(keys[:-1])) > 1:
        table.clear()
    for name in _off(path.strip(), value):
        table.pop(name, None)
    table[keys[-1]] = value


def reparsed(document: dict[str, Any], run: str) -> RunConfig:
    """The configuration of a document made from that of a run: with absolute paths of functions' files, and digests of
    the sources of objectives and engine. Raises InputError: there is no such file, the source of an objective or of the
    engine has another digest than the document gives, or as `parse_config`."""
    return parse_config(_located(document, None, files=False), f"of run {run} with the given settings")


def _located(document: dict[str, Any], folder: Path | None, files: bool = True) -> dict[str, Any]:
    def change(text: str, mark: Mark, key: str) -> str:
        if mark.place == "function":
            return located_function(text, folder, key)
        return located(text, folder) if files else text

    return _with_sources(placed(document, (RunConfig,), change, NONE))


def _with_sources(document: dict[str, Any]) -> dict[str, Any]:
    if "engine" in document:
        document = {**document, "engine": _with_source(document["engine"], "engine", ENGINES)}
    train = document.get("train")
    policy = train.get("policy") if isinstance(train, dict) else None
    if not isinstance(train, dict) or not isinstance(policy, dict):
        return document
    tables = {name: _with_source(policy[name], f"train.policy.{name}") for name in OBJECTIVE_TABLES if name in policy}
    return {**document, "train": {**train, "policy": {**policy, **tables}}}


def _with_source(table: Any, key: str, group: str = GROUP) -> Any:
    if not isinstance(table, dict) or not isinstance(table.get("function"), str):
        return table
    return {**table, "source": found_code(table["function"], str(table.get("source", "")), key, group)[1]}


def folder_of(configuration: str) -> Path | None:
    """The local folder of a configuration file; None if it is at a URL."""
    return None if "://" in configuration else Path(configuration).absolute().parent


def located(name: str, folder: Path | None) -> str:
    """`name` as an absolute path if it names local files, by path or by pattern; else as it is. So a run is the same
    from whatever folder it is started. Files beside the configuration come before those in the working directory; what
    exists in neither may be a URL, a reference (`env:NAME`) or an id of the hub."""
    if "://" in name or referenced(name) is not None:
        return name
    file = Path(name).expanduser()
    found = next((place for place in ([] if folder is None else [folder / file]) + [file] if _is_there(place)), None)
    return name if found is None else str(found.absolute())


def _is_there(place: Path) -> bool:
    try:
        return place.exists() or bool(glob.glob(str(place), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    except OSError:  # a name that is too long, or a folder that must not be read
        return False


def _explain(item: dict[str, Any]) -> str:
    item["loc"] = tuple(step for step in item["loc"] if step not in _FORMS)
    place = ".".join(str(step) for step in _without_types(_keys(item))) or "document"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        known, given = item["ctx"].get("expected_tags"), dict(item["input"]).get("type")
        said = "this key is required" if given is None else f"{shown(given, 'type')!r} is not known"
        types = [repr(type_of(model)) for model in _models_at(item["loc"])]
        return f"{place}.type: {said}; use one of {known or ', '.join(types)}"
    if item["type"] == "extra_forbidden":
        return f"{place}: unknown key; {_repair(item['loc'])}"
    if item["type"] == "missing":
        return f"{place}: this key is required"
    if item["type"] == "value_error":  # ours: it includes the input
        text = item["msg"].removeprefix("Value error, ")
        return text if text.startswith(place) or not item["loc"] else f"{place}: {text}"
    return f"{place}: {item['msg']} (given: {shown(item['input'], str(item['loc'][-1]))!r})"


def _keys(item: dict[str, Any]) -> Sequence[str | int]:
    """Place of a flaw; inside free values pydantic adds the type of each."""
    free = item["type"] == "finite_number" and item["loc"][-1] == "float"
    return [step for step in item["loc"] if step not in ("list", "dict", "float")] if free else item["loc"]


def _repair(location: Sequence[str | int]) -> str:
    known = list(_models_at(location[:-1])[0].model_fields)
    if near := difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=_NEAR):
        return f"did you mean {'.'.join([*map(str, _without_types(location[:-1])), *near])!r}?"
    return f"remove it, or use one of {', '.join(known)}"


def _models_at(location: Sequence[str | int]) -> Models:
    """Models of the table at a place: more than one if its key `type` decides and is not known."""
    models: Models = (RunConfig,)
    for step in map(str, location):
        if step in models[0].model_fields and len(models) == 1:
            models = tuple(models_in(models[0].model_fields[step].annotation)) or models
        else:  # the number of an element, or the name of an alternative
            models = tuple(model for model in models if type_of(model) == step) or models
    return models


def _without_types(location: Sequence[str | int]) -> list[str | int]:
    """The place of a flaw, without the types of tables, which pydantic adds."""
    return [
        step
        for number, step in enumerate(location)
        if len(before := _models_at(location[:number])) == 1 or str(step) not in [type_of(model) for model in before]
    ]


def written(document: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """The lines of a document of plain types: of each table first its own keys, then the tables in it. A key without a
    value is left out, as it is in a file."""
    given = {key: value for key, value in document.items() if value is not None}
    tables = {key: value for key, value in given.items() if isinstance(value, Mapping) and value}
    if own := [f"{_key(key)} = {toml(value)}" for key, value in given.items() if key not in tables]:
        yield from [f"[{'.'.join(map(_key, path))}]", *own, ""] if path else [*own, ""]
    for key, value in tables.items():
        yield from written(value, (*path, key))


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {toml(one)}' for key, one in value.items() if one is not None)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):  # JSON escapes what TOML does, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml(key)
