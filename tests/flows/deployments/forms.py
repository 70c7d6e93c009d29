"""Forms of deployments, as tests fill them in."""

from typing import Any


def fields(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Every field of a form, with those of its tables."""
    found = {f"{path}{name}": field for name, field in schema.get("properties", {}).items()}
    return found | {name: one for at, field in found.items() for name, one in fields(field, f"{at}.").items()}


def nested(filled: dict[str, Any]) -> dict[str, Any]:
    """Fields by their dotted names as tables."""
    tables: dict[str, Any] = {}
    for name, value in filled.items():
        *path, last = name.split(".")
        here = tables
        for step in path:
            here = here.setdefault(step, {})
        here[last] = value
    return tables
