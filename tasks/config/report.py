"""The table `[report]`: who else is told about a run."""

from pydantic import Field, ValidationInfo, field_validator

from tasks.config.section import Section, without_credentials


class ReportSection(Section):
    """What is shown of a run beside its own files and the Prefect server; it changes no result."""

    examples: int = Field(default=3, ge=0)
    """Best and worst samples, that many of each, in the table of examples of each iteration on the Prefect flow run."""
    wandb: bool | str = False
    """Weights & Biases: the project, or true for "ratchet". Needs `ratchet[wandb]`; WANDB_MODE=offline works."""
    mlflow: str | None = None
    """MLflow: the tracking URI, such as "sqlite:///mlflow.db" or "https://host". Needs `ratchet[mlflow]`."""

    trackers: tuple[str, ...] = ()
    """Trackers of your own: `file.py:name`, `package.module:name` or an entry point of the group `ratchet.trackers`."""

    @field_validator("mlflow")
    @classmethod
    def _public(cls, url: str | None, info: ValidationInfo) -> str | None:
        return without_credentials(url, "report.mlflow", info)
