"""The table `[data]`: prompts."""

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tasks.config.section import Section, without_credentials


class GeneratedAddition(Section):
    """Integer addition: prompts such as `47+38=`, answers such as `085`, all of equal width."""

    min_operand: int = Field(default=10, ge=0)
    """Smallest operand."""
    max_operand: int = Field(default=99, ge=1)
    """Largest operand."""
    held_out: int = Field(default=256, ge=1)
    """Prompts kept for evaluation; training sees neither them nor their commuted twins."""
    warmup: int = Field(default=0, ge=0)
    """Demonstrations for the supervised warm-up, on training prompts; at most one per prompt."""
    warmup_mistakes: float = Field(default=0.0, ge=0, le=1)
    """Share of the demonstrations that forget to carry, which RL has to correct."""

    @model_validator(mode="after")
    def _ordered(self) -> "GeneratedAddition":
        if self.min_operand > self.max_operand:
            raise ValueError(f"min_operand {self.min_operand} is above max_operand {self.max_operand}")
        return self


class DataSection(Section):
    """Prompts: JSONL or Parquet on fsspec, one record per prompt; or generated."""

    train: str | None = None
    """URL of the training prompts."""
    held_out: str | None = None
    """URL of the prompts for evaluation."""
    warmup: str | None = None
    """URL of solved examples for the supervised warm-up."""
    generate: GeneratedAddition | None = None
    """Generate an addition data set instead."""
    id_field: str = "id"
    """Field with the prompt's id; a missing one is replaced by the record's number."""
    prompt_field: str = "prompt"
    """Field with the prompt's text."""
    answer_field: str = "answer"
    """Field with the solved answer, for the warm-up."""
    shuffle: bool = True
    """Whether each pass over the prompts has its own order (from the run's seed)."""

    @field_validator("train", "held_out", "warmup")
    @classmethod
    def _public(cls, url: str | None, info: ValidationInfo) -> str | None:
        return without_credentials(url, f"data.{info.field_name}", info)

    @model_validator(mode="after")
    def _one_of_both(self) -> "DataSection":
        if (self.train is None) == (self.generate is None):
            raise ValueError("give exactly one of data.train and data.generate")
        return self
