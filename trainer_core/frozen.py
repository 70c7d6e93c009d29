"""Base class of configurations."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable configuration, in which an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
