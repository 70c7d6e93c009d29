"""The table `[reward]`: how responses are scored."""

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from tasks.config.credentials import literal_secrets
from tasks.config.section import FROM_STORAGE, Section


class RewardSection(Section):
    """How responses are scored."""

    function: str = "exact_match"
    """Name of an entry point in the group `ratchet.rewards`, or `package.module:function`."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Keyword arguments bound to the function. A secret is given as "env:NAME", a reference to the environment."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Seconds after which a sample is recorded as timed out; enforced only in separate scoring processes."""
    processes: int = Field(default=0, ge=0)
    """Scoring processes; 0 scores in the calling process, allowed only for built-in functions that cannot hang."""

    @field_validator("arguments")
    @classmethod
    def _no_secrets(cls, arguments: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        found = [] if info.context == FROM_STORAGE else list(literal_secrets(arguments, "reward.arguments"))
        if found:
            raise ValueError(
                f"{' and '.join(found)} would be stored with the run, and looks like a secret: give it by reference, "
                'as "env:NAME", and export NAME'
            )
        return arguments
