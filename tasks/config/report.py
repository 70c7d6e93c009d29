"""The table `[report]`: who else is told about a run."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from tasks.config.section import Section, public
from trainer_core.marks import FUNCTION

_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")


def _without_token(address: str) -> str:
    """The address. Raises ValueError: it is none, or has a token, which Prefect would store."""
    if _ADDRESS.fullmatch(address) is None:
        raise ValueError("it is not the address of a viewer without its token: give it as http://127.0.0.1:8400")
    return address.rstrip("/")


class ReportSection(Section):
    """Displays of a run beside its own files and the Prefect server; they change no result."""

    examples: int = Field(default=3, ge=0)
    """Best and worst samples, that many of each, in the table of examples of each iteration on the Prefect flow run."""
    viewer: Annotated[str, AfterValidator(_without_token)] | None = None
    """Address of a viewer that `ratchet view --port P` serves, without its token; the Prefect flow run links to it."""
    wandb: bool | str = False
    """Weights & Biases: the project, or true for "ratchet". Needs the package wandb; WANDB_MODE=offline works."""
    mlflow: Annotated[str, AfterValidator(public)] | None = None
    """MLflow: the tracking URI, such as "sqlite:///mlflow.db" or "https://host". Needs mlflow-skinny."""

    trackers: Annotated[tuple[str, ...], FUNCTION] = ()
    """Trackers of your own: `file.py:name`, `package.module:name` or an entry point of the group `ratchet.trackers`."""
