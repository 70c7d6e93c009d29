"""The base of every configuration of a trainer."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of every configuration here: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
