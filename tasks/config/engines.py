"""The tables `[engines.ROLE]`: engines of a run beside those that sample for it."""

from typing import Annotated

from pydantic import Field

from tasks.config.section import Section
from trainer_core.config import Precision
from trainer_core.marks import FILES, RUNTIME


class JudgeEngine(Section):
    """An engine with a model of its own, which the reward `judge` asks in place of a URL."""

    source: Annotated[str, FILES]
    """Hugging Face directory of the judge, named as `model.source`; `model.download`, `token` and `accept` count for it
    too. Its tokenizer has a chat template."""
    precision: Precision = "fp32"
    """Type of its weights and activations."""
    max_model_len: Annotated[int, RUNTIME] = Field(default=2048, ge=8)
    """Longest question with its answer, in tokens."""
    max_num_seqs: Annotated[int, RUNTIME] = Field(default=64, ge=1)
    """Answers decoded together."""
    kv_cache_mib: Annotated[int | None, RUNTIME] = Field(default=None, ge=1)
    """Its key-value cache, MiB. By default what `gpu_memory_utilization` leaves; on CPU 128."""
    gpu_memory_utilization: Annotated[float, RUNTIME] = Field(default=0.3, gt=0, le=1)
    """Share of its card that it may use. No effect on CPU."""


class EnginesSection(Section):
    """Engines of a run beside those that sample for it."""

    judge: JudgeEngine
