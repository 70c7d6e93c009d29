"""The base of all tables of the configuration."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from tasks.config.credentials import has_credentials, referenced
from trainer_core.marks import Mark


class Section(BaseModel):
    """A table of the configuration: immutable, and an unknown key is an error."""

    # pydantic's own messages would repeat the input, secrets included
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _without_secrets(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a literal secret, or a URL with credentials in the place of a file, which would be stored."""
        marks = [one for one in cls.model_fields[str(info.field_name)].metadata if isinstance(one, Mark)]
        if isinstance(value, str) and any(one.secret for one in marks) and referenced(value) is None:
            raise ValueError('it would be stored with the run: give it by reference, as "env:NAME"')
        if isinstance(value, str) and any(one.place == "files" for one in marks):
            check_url(value)
        return value


def check_url(url: str) -> None:
    """Raises ValueError: a URL has credentials."""
    if has_credentials(url):
        raise ValueError(
            "it is a URL with credentials, which would be stored with the run: leave them to the environment, or "
            'give the whole URL by reference, as "env:NAME", and export NAME'
        )
