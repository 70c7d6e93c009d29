"""The keys of a configuration, as its models declare them: types and marks. Everything about keys derives from here."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from trainer_core.marks import Mark
from trainer_core.user_code import without_folder

Models = tuple[type[BaseModel], ...]  # the models of which a table may be: several where its key `type` decides
NONE = Mark()


@dataclass(frozen=True)
class Key:
    field: FieldInfo
    mark: Mark  # its own marks, with the stages of the table that it is in unless it has its own
    models: Models  # of its table, or of the tables in its list; none for a plain value
    below: Mark  # the marks that these inherit


@functools.cache
def key_of(models: Models, name: str, above: Mark = NONE) -> Key | None:
    """The key `name` of a table that inherits the marks `above`; None if there is none."""
    field = next((model.model_fields[name] for model in models if name in model.model_fields), None)
    if field is None:
        return None
    marks = [one for one in field.metadata if isinstance(one, Mark)]
    own = Mark(
        next((one.stages for one in marks if one.stages is not None), above.stages),
        any(one.secret for one in marks),
        next((one.place for one in marks if one.place is not None), None),
    )
    # the mark of files is of a bare text: tables in its place have marks of their own
    return Key(field, own, tuple(models_in(field.annotation)), above if own.place == "files" else Mark(own.stages))


def key_at(model: type[BaseModel], path: str) -> Key | None:
    """The key at `section.key`; of a value in a free table that of the table, and None of one that is not there."""
    key, models, above = None, (model,), NONE
    for name in path.split("."):
        if (found := key_of(models, name, above)) is None:
            return key if key is not None and not key.models else None
        key, models, above = found, found.models, found.below
    return key


def leaves_of(model: type[BaseModel], above: Mark = NONE, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key that is not a table itself, by `section.key`; the keys of tables in lists too."""
    for name in model.model_fields:
        key = key_of((model,), name, above)
        assert key is not None
        if not key.models or key.mark.place == "files":
            yield f"{prefix}{name}", key
        for inner in key.models:
            yield from leaves_of(inner, key.below, f"{prefix}{name}.")


def decided(document: Mapping[str, JsonValue], models: Models, stage: str | None, above: Mark) -> dict[str, JsonValue]:
    """The settings of a document, of plain JSON types, that decide the result of a stage; None is any stage."""
    found: dict[str, JsonValue] = {}
    for name, value in document.items():
        if (key := key_of(models, name, above)) is None:
            found[name] = value
        elif key.models and isinstance(value, dict):
            inner = decided(value, key.models, stage, key.below)
            found |= {name: inner} if inner or key.mark.read_by(stage) else {}
        elif key.models and isinstance(value, list):
            rows = [decided(one, key.models, stage, key.below) if isinstance(one, dict) else one for one in value]
            found |= {name: rows} if key.below.read_by(stage) else {}
        elif key.mark.read_by(stage):
            named = key.mark.place == "function" and isinstance(value, str)
            found[name] = without_folder(value) if named else value  # pyright: ignore[reportArgumentType]
    return found


def placed(value: Any, models: Models, change: Callable[[str, Mark, str], str], mark: Mark, path: str = "") -> Any:
    """A document, before it is validated, in which `change`, given the text, the key's mark and `section.key`, has
    replaced each text that names files or a function."""
    if isinstance(value, list):
        return [placed(one, models, change, mark, path) for one in value]
    if isinstance(value, dict):
        found = dict(value)
        for name, one in value.items():
            if (key := key_of(models, name)) is not None:
                found[name] = placed(one, key.models, change, key.mark, f"{path}.{name}".lstrip("."))
        return found
    return change(value, mark, path) if isinstance(value, str) and mark.place is not None else value


def choices(annotation: Any) -> list[Any]:
    """The alternatives of a type, without None; those of a Literal are its values."""
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, Literal):
        return [choice for part in get_args(annotation) if part is not type(None) for choice in choices(part)]
    return [annotation]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models of the tables that a type takes, also in a list."""
    for choice in choices(annotation):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            yield choice
        elif get_origin(choice) is tuple:
            yield from models_in(get_args(choice)[0])


def type_of(model: type[BaseModel]) -> str | None:
    """The `type` by which a table is of this model; None if it has none."""
    return model.model_fields["type"].default if "type" in model.model_fields else None
