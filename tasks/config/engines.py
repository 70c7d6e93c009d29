"""The tables `[engines.ROLE]`: engines of a run beside those that sample for it."""

from typing import Annotated

from pydantic import Field

from tasks.config.section import Section
from trainer_core.config import Precision
from trainer_core.marks import FILES, RUNTIME


class JudgeEngine(Section):
    """An engine with a model of its own: one that the reward `judge` asks in place of a URL, or the reward model whose
    values are the reward `reward_model`."""

    source: Annotated[str, FILES]
    """Hugging Face directory of the model, named as `model.source`; `model.download`, `token` and `accept` count for it
    too. A judge is a chat model, whose tokenizer has a chat template. A reward model is a classifier with one label
    (`...ForSequenceClassification`), as `ratchet export` makes of one, and has the tokenizer of the run's model."""
    precision: Precision = "fp32"
    """Type of its weights and activations."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest question with its answer, or prompt with its response, in tokens. What is longer has no score, so it
    decides results: only a new run may change it."""
    max_num_seqs: Annotated[int, RUNTIME] = Field(default=64, ge=1)
    """Answers decoded together; or, on a card that need not repeat its results, samples that a reward model reads
    together."""
    kv_cache_mib: Annotated[int | None, RUNTIME] = Field(default=None, ge=1)
    """Its key-value cache, MiB. By default what `gpu_memory_utilization` leaves; on CPU 128."""
    gpu_memory_utilization: Annotated[float, RUNTIME] = Field(default=0.3, gt=0, le=1)
    """Share of its card that it may use. No effect on CPU."""


class EnginesSection(Section):
    """Engines of a run beside those that sample for it."""

    judge: JudgeEngine
