"""Settings of an export: one declaration for the command, the Python call and the form of the deployment."""

from pydantic import model_validator

from storage.errors import InputError
from tasks.config.section import Section
from trainer_core.config import Precision


class ExportSettings(Section):
    """Content of an exported folder, beside the run and the iteration."""

    precision: Precision | None = None
    """Type of the weights; by default that of the trained state."""
    adapter: bool = False
    """Write the adapters of LoRA alone, as peft loads them."""
    critic: bool = False
    """Write the critic, as train.critic.source of another run takes it."""

    @model_validator(mode="after")
    def _one_model(self) -> "ExportSettings":
        if self.adapter and self.critic:
            raise InputError("adapter and critic name two models: give one of them")
        if self.adapter and self.precision is not None:
            raise InputError("adapter writes factors as they are trained: leave precision out")
        return self
