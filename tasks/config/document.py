"""The document that defines a run: TOML in, frozen models out, all errors in one message."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import fsspec
from pydantic import BaseModel, ValidationError

from storage.errors import InputError
from tasks.config.credentials import shown, shown_setting, shown_text
from tasks.config.located import folder_of, located
from tasks.config.run import RunConfig

_FILES = {"model": ("source",), "data": ("train", "held_out", "warmup")}
"""The settings that name files."""


def load_config(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (any fsspec URL) and apply `section.key=value` overrides; names of local files become absolute.

    Raises:
        InputError: the file cannot be read or parsed, a key is unknown, or a value cannot be used.
    """
    try:
        with fsspec.open(path, "rb") as file:
            document = tomllib.loads(file.read().decode())  # pyright: ignore[reportAttributeAccessIssue]
    except FileNotFoundError:
        raise InputError(f"configuration {shown_text(path)} does not exist: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"configuration {shown_text(path)} is not valid TOML: {error}") from None
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"configuration {shown_text(path)} cannot be read: {shown_text(str(error))}") from None
    for override in overrides:
        apply_override(document, override)
    return parse_config(_located(document, folder_of(path)), path)


def parse_config(document: Mapping[str, Any], where: str) -> RunConfig:
    """Validate a parsed document.

    Raises:
        InputError: all errors, one per line.
    """
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise InputError(f"configuration {shown_text(where)} cannot be used:\n{explained(error)}") from None


def explained(error: ValidationError) -> str:
    """What is wrong with a configuration, one line each, without the secrets in it."""
    return "\n".join(f"  {_explain(dict(item))}" for item in error.errors())


def apply_override(document: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into a parsed document.

    Raises:
        InputError: it has another form, or names a value as a section.
    """
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
    table[keys[-1]] = value


def _located(document: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    for section, keys in _FILES.items():
        table = document.get(section)
        if isinstance(table, dict):
            given = {key: table[key] for key in keys if isinstance(table.get(key), str)}
            document[section] = {**table, **{key: located(name, folder) for key, name in given.items()}}
    return document


def _explain(item: dict[str, Any]) -> str:
    place = ".".join(str(step) for step in item["loc"]) or "document"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _names_at(item["loc"][:-1]), n=1, cutoff=0.0)
        return f"{place}: unknown key; did you mean {'.'.join([*map(str, item['loc'][:-1]), *near])!r}?"
    if item["type"] == "missing":
        return f"{place}: this key is required"
    if item["type"] == "value_error":  # ours: it includes the input
        text = item["msg"].removeprefix("Value error, ")
        return text if text.startswith(place) else f"{place}: {text}"
    return f"{place}: {item['msg']} (given: {shown(item['input'], str(item['loc'][-1]))!r})"


def _names_at(location: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for step in location:
        annotation = model.model_fields[str(step)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)
