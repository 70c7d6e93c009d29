"""Every key of a run's configuration, read from the models: as a page, a commented example, and a form."""

import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, JsonValue, RootModel
from pydantic.fields import FieldInfo

from tasks.config.document import toml
from tasks.config.keys import choices, key_at
from tasks.config.run import RunConfig

MEANING, RUNTIME = "meaning", "runtime"
TYPE = "type"  # the key that says which of several forms a table has

_KINDS: dict[Any, str] = {
    datetime: "time", int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table",
    tuple: "list of tables",
}  # fmt: skip
_EXAMPLES = {"train.max_length": "128", "train.optimizer.learning_rate": "1e-5"}
_FORMS = {"text": '"..."', "time": "2026-11-22T03:00:00Z", "whole number": "1", "number": "1.0", "true": "true"}
_LIMITS: dict[Any, str] = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
_WIDTH = 118
_SIMPLE = ("string", "integer", "number", "boolean")
_KEPT = (
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "pattern",
)  # fmt: skip
_TRIED = "generate"  # tables of models and data for trying things, which are left out too
_CHOICE = {"type": "string", "enum": ["true", "false"]}
"""In place of a switch, which Prefect's page sends as false if nobody has touched it."""
_FIXED = "Fixed once the run has begun."

_HEAD = """\
# Configuration

A run is described by one TOML file. This page lists every key with its type, default and limits. An unknown key is an
error. Any key can be replaced on the command line: `--set section.key=value`. `ratchet config` prints this reference,
`ratchet config --example` a complete file with these texts as comments, `ratchet config --json` the JSON schema, and
`ratchet config RUN` what a run was recorded with.

Keys marked **meaning** decide the result of the stages that are named with them. They are fixed when a run starts:
it is continued only with the same values, and their digest is in each of its manifests. Keys marked **runtime** may
change whenever it is continued. Paths of model and data are among these, because their content at the first start is
stored with the run.

Secrets are not stored. A value `"env:NAME"` in `reward.arguments`, or for `model.source` and the URLs of `[data]`, is
replaced by the environment variable NAME where it is used. A literal value is refused if its key is named like a secret
(`api_key`, `token`, `password`, ...), as is a URL with a password or a signature in it.

This page is generated from the models in `tasks/config` and `trainer_core/config.py`. Change texts and marks there,
then run `ratchet config --markdown > docs/configuration.md`.
"""


@dataclass(frozen=True)
class Key:
    name: str
    path: str  # `section.key`
    kind: str  # type and limits, in words
    default: str | None  # as TOML; None if there is none
    required: bool  # True if it must be given when its table is given
    role: str  # `meaning` or `runtime`
    stages: tuple[str, ...]  # stages whose result it decides
    text: str


@dataclass(frozen=True)
class Table:
    """One table of the file: its own keys, without those of the tables below it."""

    path: str
    text: str
    keys: tuple[Key, ...]
    instead: tuple["Table", ...] = ()  # contents of the table with another `type` than the default

    @property
    def tag(self) -> str:
        """The `type` that it holds, as TOML; empty if it has none."""
        return next((key.default or "" for key in self.keys if key.name == TYPE), "")


class Schema(RootModel[dict[str, JsonValue]]):
    """The JSON schema of a configuration."""


def schema() -> Schema:
    """The JSON schema of a configuration, with every text."""
    return Schema(_json_schema())


@functools.cache
def _json_schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def tables() -> list[Table]:
    """All tables, in the order of a file."""
    return list(_tables(RunConfig, (), None))


def listed_tables() -> list[Table]:
    """The tables of which a setting takes a list, each kind once, after the first setting that does."""
    places = {model: place for place, model in reversed(list(_listed(RunConfig, ())))}
    by_place = sorted(places.items(), key=lambda item: item[1])
    return [replace(one := _whole(model, place), path=f"[{one.path}]") for model, place in by_place]


def markdown() -> str:
    """The page `docs/configuration.md`."""
    return _HEAD + "".join(_section(table) for table in (*tables(), *listed_tables()))


def example() -> str:
    """A TOML file with every key at its default and what it means as a comment."""
    head = ["# Every key of a run's configuration at its default. Keys that are not set are commented out."]
    return "\n".join([*head, *(line for table in tables() for line in _example_or_comment(table))]) + "\n"


def default_of(key: Key) -> str:
    if key.default is None:
        return "required" if key.required else "not set"
    return key.default


def _whole(model: type[BaseModel], place: tuple[str, ...]) -> Table:
    """A table with all keys of a model."""
    return Table(".".join(place), _text(model.__doc__), tuple(_key(model, name, place) for name in model.model_fields))


def _tables(model: type[BaseModel], path: tuple[str, ...], default: BaseModel | None) -> Iterator[Table]:
    below = {name: section for name, field in model.model_fields.items() if (section := _section_of(field))}
    keys = [_key(model, name, path, default) for name in model.model_fields if name not in below]
    if path and keys:
        yield Table(".".join(path), _text(model.__doc__), tuple(keys))
    for name, section in below.items():
        field, place = model.model_fields[name], (*path, name)
        inner = field.default if default is None else dict(default)[name]
        if field.discriminator:
            yield from _alternatives(field, place)
        else:
            yield from _tables(section, place, inner if isinstance(inner, BaseModel) else None)


def _alternatives(field: FieldInfo, place: tuple[str, ...]) -> Iterator[Table]:
    """A table of which `type` says what it may hold: the default, and the others as `Table.instead`."""
    kinds = [choice for choice in choices(field.annotation) if isinstance(choice, type)]
    kinds.sort(key=lambda kind: kind is not type(field.default))  # the default first
    first, *others = [_whole(kind, place) for kind in kinds]
    types = [key for table in (first, *others) for key in table.keys if key.name == TYPE]
    names, texts = " or ".join(key.kind for key in types), " ".join(f"{key.kind}: {key.text}" for key in types)
    keys = [replace(key, kind=names, text=texts) if key.name == TYPE else key for key in first.keys]
    yield replace(first, text=_text(field.description), keys=tuple(keys), instead=tuple(others))


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kinds = [choice for choice in choices(field.annotation) if isinstance(choice, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _key(model: type[BaseModel], name: str, path: tuple[str, ...], default: BaseModel | None = None) -> Key:
    field, place = model.model_fields[name], (*path, name)
    key = key_at(RunConfig, ".".join(place))
    stages = () if key is None else key.mark.stages or ()
    value = field.default if default is None else dict(default)[name]
    known = value is not None and not (field.is_required() and default is None)
    limits = [f"{_LIMITS[type(one)]} {astuple(one)[0]}" for one in field.metadata if type(one) in _LIMITS]
    return Key(
        name=name,
        path=".".join(place),
        kind=", ".join([" or ".join(map(_kind_of, choices(field.annotation))), *limits]),
        default=toml(value) if known else None,
        required=field.is_required(),
        role=MEANING if stages else RUNTIME,
        stages=stages,
        text=_text(field.description),
    )


def _listed(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Settings that take a list of tables, with what such a table is."""
    for name, field in model.model_fields.items():
        if (section := _section_of(field)) is not None:
            yield from _listed(section, (*path, name))
        for choice in choices(field.annotation):
            inner = get_args(choice)[0] if get_origin(choice) is tuple else None
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield (*path, name), inner


def _kind_of(choice: Any) -> str:
    if isinstance(choice, str | int):
        return f'"{choice}"' if isinstance(choice, str) else f"{choice}"
    if get_origin(choice) is not tuple:
        return _KINDS[get_origin(choice) or choice]
    inner = get_args(choice)[0]
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return _KINDS[tuple]
    return f"list of {' or '.join(f'{_kind_of(part)}s' for part in choices(inner))}"


def _text(given: str | None) -> str:
    return " ".join((given or "").split())


def _section(table: Table) -> str:
    text = _written(table, f"## `[{table.path}]`")
    for other in table.instead:
        own = replace(other, keys=tuple(key for key in other.keys if key.name != TYPE))
        text += _written(own, f"### `[{other.path}]` with `type = {other.tag}`")
    return text


def _written(table: Table, title: str) -> str:
    head = [f"\n{title}", "", table.text]
    if not table.keys:
        return "\n".join([*head, ""])
    rows = ["", "| key | type | default | role | text |", "| --- | --- | --- | --- | --- |"]
    for key in table.keys:
        default = default_of(key) if key.default is None else f"`{key.default}`"
        note = "; required if the table is given" if key.required and key.default is not None else ""
        role = f"{key.role}: {', '.join(key.stages)}" if key.stages else key.role
        cells = (f"`{key.name}`", key.kind, default + note, role, key.text)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join([*head, *rows, ""])


def _example_or_comment(table: Table) -> Iterator[str]:
    """The lines of a table, commented out if it cannot be given without a choice of the user's."""
    left_out = any(key.required and key.path not in _EXAMPLES for key in table.keys)
    for line in _example_of(table):
        yield f"# {line}" if left_out and line and not line.startswith("#") else line


def _example_of(table: Table) -> Iterator[str]:
    yield from ["", *_comment(table.text), f"[{table.path}]"]
    for key in table.keys:
        value = key.default or _EXAMPLES.get(key.path)
        facts = [key.kind, *(["required"] if key.required else []), *([RUNTIME] if key.role == RUNTIME else [])]
        yield from _comment(f"{key.text} ({'; '.join(facts)})")
        yield f"{key.name} = {value}" if value else f"# {key.name} = {_form(key.kind)}"
    for other in table.instead:
        own = [f"{key.name} = {key.default or _form(key.kind)}" for key in other.keys if key.name != TYPE]
        yield from _comment(f"With type = {other.tag}: {', '.join(own) or 'no other key'}. {other.text}")


def _form(kind: str) -> str:
    first = kind.partition(" or ")[0].partition(",")[0]
    if first.startswith('"'):  # a choice
        return first
    return "[...]" if first.startswith("list") else _FORMS[first]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def section_form(section: str) -> dict[str, Any]:
    """The JSON schema of a table of the configuration, for a form in which every setting may be left empty: titles,
    texts, types and limits. A setting that takes a table of any keys or a list of tables belongs into a file."""
    whole = _json_schema()
    made = _property(whole["properties"][section], (section,), whole["$defs"])
    assert made is not None
    return made


def _property(schema: Mapping[str, Any], path: tuple[str, ...], known: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of a setting or table; None if it has none."""
    key = key_at(RunConfig, ".".join(path))
    assert key is not None
    found = _resolved(schema, known)
    # of a secret a person would type the value itself, which Prefect would store
    if found is None or key.mark.secret or path[-1] == _TRIED:
        return None
    text = _text(schema.get("description")) or _text(found.get("description"))
    common = {"title": ".".join(path), "description": text}
    if "properties" in found:
        inner = {name: _property(one, (*path, name), known) for name, one in found["properties"].items()}
        fields = {name: one for name, one in inner.items() if one is not None}
        return {**common, "type": "object", "properties": fields, "additionalProperties": False}
    if found["type"] == "boolean":
        found = _CHOICE
    default = schema.get("default")
    notes = [] if default in (None, "") else [f"Default: {default}."]
    notes += [_FIXED] if key.mark.stages else []
    return {**common, "description": " ".join([text, *notes]), **{key: found[key] for key in _KEPT if key in found}}


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that this one refers to, or the first of its alternatives that a person can type."""
    if "$ref" in schema:
        return _resolved(known[schema["$ref"].rpartition("/")[2]], known)
    if (alternatives := schema.get("anyOf", schema.get("oneOf"))) is not None:
        return next((one for each in alternatives if (one := _resolved(each, known)) is not None), None)
    return schema if schema.get("type") in _SIMPLE or "properties" in schema else None
