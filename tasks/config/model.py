"""The tables `[model]`, also read for teacher, critic and judge, and `[engines.ROLE]`, engines that do not sample."""

from typing import Annotated

from pydantic import Field, model_validator

from tasks.config.section import Section
from trainer_core.config import Precision
from trainer_core.marks import FILES, RUNTIME, SECRET


class GeneratedModel(Section):
    """A small Qwen3-architecture model with random weights, generated at the start."""

    layers: int = 2
    """Transformer layers."""
    hidden: int = 128
    """Hidden size."""
    intermediate: int = 256
    """Width of the gated MLP."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads."""
    head_dim: int = 32
    """Size of one head."""
    vocabulary: int = 32
    """Rows of the embedding; the character tokenizer uses the first of them."""
    max_positions: int = 128
    """Longest sequence the model supports, in tokens."""
    tied_embeddings: bool = False
    """Let the output layer share the embedding's weights."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""


class ModelSection(Section):
    """The model that is trained: exactly one of `source` and `generate`."""

    source: Annotated[str | None, FILES] = None
    """Hugging Face directory (config.json, safetensors, tokenizer): a local path, a URL, or `org/name[@revision]` in
    the hub's cache; an existing folder comes first."""
    download: Annotated[bool, RUNTIME] = False
    """Fetch `source` from the hub when the run is prepared; otherwise the hub is never contacted."""
    token: Annotated[str | None, SECRET] = None
    """Token for the hub, by reference: "env:NAME"."""
    accept: Annotated[tuple[str, ...], RUNTIME] = ()
    """Keys of the model's config.json that are let pass although trainer and engine are not known to obey them, such as
    "rope_parameters.attention_factor". The probe of a sync compares trainer and engine alone."""
    generate: GeneratedModel | None = None
    """Generate a small one instead."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "ModelSection":
        if (self.source is None) == (self.generate is None):
            raise ValueError("give exactly one of model.source and model.generate")
        return self


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
    """Answers decoded together; or samples read together by a reward model, on a card that need not repeat results."""
    kv_cache_mib: Annotated[int | None, RUNTIME] = Field(default=None, ge=1)
    """Its key-value cache, MiB. By default what `gpu_memory_utilization` leaves; on CPU 128."""
    gpu_memory_utilization: Annotated[float, RUNTIME] = Field(default=0.3, gt=0, le=1)
    """Share of its card that it may use. No effect on CPU."""


class EnginesSection(Section):
    """Engines of a run beside those that sample for it."""

    judge: JudgeEngine
