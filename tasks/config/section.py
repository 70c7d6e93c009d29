"""What all tables of the configuration have in common."""

from pydantic import BaseModel, ConfigDict, ValidationInfo

from tasks.config.credentials import has_credentials

FROM_STORAGE = {"from_storage": True}
"""Validation context of a stored record: earlier versions recorded secrets, which are masked when it is read."""


class Section(BaseModel):
    """A table of the configuration: immutable, and an unknown key is an error."""

    # pydantic's own messages would repeat the input, secrets included
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )


def without_credentials(url: str | None, key: str, info: ValidationInfo) -> str | None:
    """`url`, unless it holds credentials and does not come from storage. Raises ValueError, naming `key`."""
    if url is not None and has_credentials(url) and info.context != FROM_STORAGE:
        raise ValueError(
            f"{key} is a URL with credentials, which would be stored with the run: leave them to the environment, or "
            'give the whole URL by reference, as "env:NAME", and export NAME'
        )
    return url
