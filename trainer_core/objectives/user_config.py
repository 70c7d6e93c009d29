"""Configuration of an advantage or a loss of the user's own. Imports no torch."""

from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from storage.errors import InputError
from trainer_core.frozen import Frozen
from trainer_core.marks import FUNCTION
from trainer_core.user_code import UserFunction, find_function, source_digest

GROUP = "ratchet.objectives"
OBJECTIVE_TABLES = ("advantage", "loss")
"""Tables of `train.policy` that may name code of the user's own."""


class UserTable(Frozen):
    """Code of the user's own."""

    runs_user_code: ClassVar[bool] = True
    function: Annotated[str, FUNCTION]
    """Function or class: `file.py:NAME` with a file beside the configuration or in the working directory,
    `package.module:NAME`, or an entry point of the group `ratchet.objectives`."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Keyword arguments: of each call of a function, or of the class when it is made."""
    source: str = ""
    """Digest of its source, which is filled in when a configuration is read: another source is another run. If it is
    given, the source must have it."""


def found_code(name: str, source: str, key: str, group: str = GROUP) -> tuple[UserFunction, str]:
    """The code that a configuration names, and the digest of its source now, which must be `source` if that is given;
    nothing is imported. `key` is that of the table, for messages. Raises InputError: it cannot be found, or has
    changed."""
    found = find_function(name, f"{key}.function", group)
    digest = source_digest(found)
    if source not in ("", digest):
        raise InputError(
            f"{key}.function {found.name!r} has changed: the digest of its source is {digest}, and {key}.source is "
            f"{source}. Put the old source back, or begin a run or a fork with the new one (--set {key}.source=)"
        )
    return found, digest
