"""Tables of the configuration as a form: JSON schemas in which every setting may be left empty.

A setting that takes a table of any keys or a list of tables is left out: it belongs into a file.
"""

from collections.abc import Mapping
from typing import Any

from tasks.config.keys import key_at
from tasks.config.run import RunConfig
from trainer_core.marks import Mark

_SIMPLE = ("string", "integer", "number", "boolean")
_KEPT = (
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "pattern",
)  # fmt: skip
_TRIED = "generate"
"""Tables of models and data for trying things, which are left out too."""
_CHOICE = {"type": "string", "enum": ["true", "false"]}
"""In place of a switch, which Prefect's page sends as false if nobody has touched it."""
_FIXED = "Fixed once the run has begun."


def section_form(section: str) -> dict[str, Any]:
    """The JSON schema of a table of the configuration, for a form: titles, texts, types and limits, nothing required.

    Args:
        section: its name.
    """
    whole = RunConfig.model_json_schema()
    made = _property(whole["properties"][section], (section,), whole["$defs"])
    assert made is not None
    return made


def _property(schema: Mapping[str, Any], path: tuple[str, ...], known: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of a setting or table; None if it has none."""
    text, mark = _line(schema.get("description")), _mark(path)
    found = _resolved(schema, known)
    # of a secret a person would type the value itself, which Prefect would store
    if found is None or mark.secret or path[-1] == _TRIED:
        return None
    text = text or _line(found.get("description"))
    common = {"title": ".".join(path), "description": text}
    if "properties" in found:
        inner = {name: _property(one, (*path, name), known) for name, one in found["properties"].items()}
        fields = {name: one for name, one in inner.items() if one is not None}
        return {**common, "type": "object", "properties": fields, "additionalProperties": False}
    if found["type"] == "boolean":
        found = _CHOICE
    default = schema.get("default")
    notes = [] if default in (None, "") else [f"Default: {default}."]
    notes += [_FIXED] if mark.stages else []
    return {**common, "description": " ".join([text, *notes]), **{key: found[key] for key in _KEPT if key in found}}


def _mark(path: tuple[str, ...]) -> Mark:
    key = key_at(RunConfig, ".".join(path))
    assert key is not None
    return key.mark


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that this one refers to, or the first of its alternatives that a person can type."""
    if "$ref" in schema:
        return _resolved(known[schema["$ref"].rpartition("/")[2]], known)
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if alternatives is not None:
            return next((one for each in alternatives if (one := _resolved(each, known)) is not None), None)
    if schema.get("type") in _SIMPLE or "properties" in schema:
        return schema
    return None


def _line(text: str | None) -> str:
    return " ".join((text or "").split())
