"""The base of all tables of the configuration, and numbers that have the right type and cannot work all the same."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from storage.errors import InputError
from tasks.config.credentials import has_credentials, referenced
from trainer_core.marks import Mark

LARGEST = 2**31 - 1
"""Largest whole number: stored tables count in int32, and NumPy takes seeds of 32 bits, raised by ranks and steps."""
LONGEST_S = 1e8  # longest deadline, seconds: three years. The operating system's own limit is a few hundred
COLDEST = 0.01  # the lowest temperature that vLLM samples at; it raises a lower one without a word that reaches the run
_FREE = re.compile(r"(reward\.(functions\[\d+\]\.)?|environment\.)arguments\b")
"""Keys below belong to the user's function, which alone knows the values that it can use."""


class Section(BaseModel):
    """A table of the configuration: immutable, and an unknown key is an error."""

    # pydantic's own messages would repeat the input, secrets included
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _without_secrets(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a literal secret, or a URL with credentials in place of a file, which would be stored."""
        if isinstance(value, str):
            marks = [one for one in cls.model_fields[str(info.field_name)].metadata if isinstance(one, Mark)]
            if any(one.secret for one in marks) and referenced(value) is None:
                raise ValueError('it would be stored with the run: give it by reference, as "env:NAME"')
            if any(one.place == "files" for one in marks):
                public(value)
        return value


def settings_of[S: Section](model: type[S], given: Mapping[str, Any], what: str) -> S:
    """Settings by name, in messages those of `what`. Raises InputError: an unknown name, or a value of no use."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        flaws = [f"{'.'.join(map(str, one['loc']))}: {_said(one)} (given: {one['input']!r})" for one in error.errors()]
        known = ", ".join(model.model_fields)
        raise InputError(f"{what} has the settings {known}; wrong are\n" + "\n".join(flaws)) from None


def _said(flaw: ErrorDetails) -> str:
    return "there is no such setting" if flaw["type"] == "extra_forbidden" else flaw["msg"]


def public(url: str) -> str:
    """The URL. Raises ValueError: it has credentials."""
    if has_credentials(url):
        fact = "it is a URL with credentials, which would be stored with the run: leave them to the environment"
        raise ValueError(f'{fact}, or give the whole URL by reference, as "env:NAME", and export NAME')
    return url


def unusable_numbers(value: Any, path: str = "") -> Iterator[str]:
    """One message for each number in a configuration that cannot work: too large, too long, a negative seed."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from unusable_numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from unusable_numbers(inner, f"{path}[{number}]")
    elif isinstance(value, int | float) and _FREE.match(path) is None:
        yield from _out_of_range(value, path)


def _out_of_range(value: float, path: str) -> Iterator[str]:
    if path.endswith("seed") and not 0 <= value <= LARGEST:
        yield f"{path}: {value} cannot be a seed: give a whole number from 0 to {LARGEST}"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield f"{path}: {value} is too large: give at most {LARGEST}"
    elif path.endswith("_s") and value > LONGEST_S:
        yield f"{path}: {value:g} seconds are too long to wait for: give at most {LONGEST_S:g}"
