"""The document that defines a run: TOML in, frozen models, JSON out. Imports without torch."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import fsspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from storage.errors import InputError
from storage.ids import check_run_name
from tasks.config.credentials import has_credentials, literal_secrets, shown, shown_setting, shown_text
from tasks.config.identity import meaning
from trainer_core.config import Device, OptimizerConfig, Precision, TrainerConfig

FROM_STORAGE = {"from_storage": True}
"""Validation context of a stored record: earlier versions recorded secrets, which are masked when it is read."""


class Section(BaseModel):
    """A table of the configuration: immutable, and an unknown key is an error."""

    # pydantic's own messages would repeat the input, secrets included
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


class RunSection(Section):
    """Which run this is and how far it goes."""

    name: str | None = None
    """Id of the run below the storage root; also set by `--run`."""
    iterations: int = Field(default=1, ge=0)
    """RL iterations after the preparation (iteration 0). May be raised later to continue."""
    seed: int = 0
    """Source of every other seed: model, data order, samples, trainer."""

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str | None) -> str | None:
        return name if name is None else check_run_name(name)


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
    """Whether the output layer shares the embedding's weights."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""


class ModelSection(Section):
    """The model that is trained: exactly one of `source` and `generate`."""

    source: str | None = None
    """Local path or URL of a Hugging Face directory (config.json, safetensors, tokenizer.json)."""
    generate: GeneratedModel | None = None
    """Generate a small one instead."""

    @field_validator("source")
    @classmethod
    def _public(cls, url: str | None, info: ValidationInfo) -> str | None:
        return _without_credentials(url, "model.source", info)

    @model_validator(mode="after")
    def _one_of_both(self) -> "ModelSection":
        if (self.source is None) == (self.generate is None):
            raise ValueError("give exactly one of model.source and model.generate")
        return self


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
        return _without_credentials(url, f"data.{info.field_name}", info)

    @model_validator(mode="after")
    def _one_of_both(self) -> "DataSection":
        if (self.train is None) == (self.generate is None):
            raise ValueError("give exactly one of data.train and data.generate")
        return self


class WarmupSection(Section):
    """Supervised steps before the first iteration, by the same trainer."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 starts RL from the model as it is."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per step."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Its own optimizer and schedule; RL starts with a fresh one."""


class RolloutSection(Section):
    """What the engine samples in one iteration."""

    prompts: int = Field(default=32, ge=1)
    """Prompt groups per iteration."""
    samples: int = Field(default=8, ge=1)
    """Samples of each prompt: the group of GRPO."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    max_tokens: int = Field(default=16, ge=1)
    """Limit on response tokens."""
    groups_per_part: int = Field(default=64, ge=1)
    """Prompt groups in one stored part."""


class RewardSection(Section):
    """How responses are scored."""

    function: str = "exact_match"
    """Name of an entry point in the group `ratchet.rewards`, or `package.module:function`."""
    arguments: dict[str, JsonValue] = {}
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


class SyncSection(Section):
    """How the arrival of weights is proved."""

    probe_sequences: int = Field(default=8, ge=1)
    """Held-out prompts with answers whose log-probabilities engine and trainer must agree on."""
    max_mean_difference: float = Field(default=1e-3, gt=0)
    """Allowed mean |engine - trainer| over the probe tokens, nat."""
    max_difference: float = Field(default=5e-3, gt=0)
    """Allowed largest |engine - trainer|, nat."""


class EvaluateSection(Section):
    """Greedy answers to held-out prompts."""

    every: int = Field(default=1, ge=0)
    """Evaluate every N iterations, and after the last; 0 disables evaluation."""
    prompts: int = Field(default=256, ge=1)
    """Number of held-out prompts, counted from the first."""


class EngineSection(Section):
    """The rollout engines. With a deterministic engine only `precision` changes results."""

    count: int = Field(default=1, ge=1)
    """Engines (Ray actors)."""
    max_model_len: int = Field(default=128, ge=8)
    """Longest sequence, prompt and response, in tokens."""
    max_num_seqs: int = Field(default=512, ge=1)
    """Sequences decoded together."""
    kv_cache_mib: int = Field(default=128, ge=1)
    """Key-value cache, MiB."""
    precision: Precision = "fp32"
    """Type of the engine's weights and activations. It decides what is sampled: no rollout mixes two of them."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of the card the engine may use; the trainer needs the rest. No effect on CPU."""
    cuda_graphs: bool = False
    """Capture CUDA graphs: faster steps, but a start that takes a minute longer. No effect on CPU."""


class WorkersSection(Section):
    """How long processes that compute may take before they count as lost; it changes no result."""

    start_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for trainer ranks or an engine to come up: imports, the model, CUDA graphs."""
    call_deadline_s: float = Field(default=14400.0, gt=0)
    """Seconds for one call: all training of an iteration, the samples of one stored part, saving a state."""


class StorageSection(Section):
    """How long train states are kept. The states of iteration 0 and of the newest iteration are always kept."""

    keep_newest: int | None = Field(default=None, ge=1)
    """Keep the states of this many of the newest iterations; all if not given."""
    keep_every: int | None = Field(default=None, ge=1)
    """Beyond those, keep the states of iterations divisible by this number."""

    @model_validator(mode="after")
    def _beyond_something(self) -> "StorageSection":
        if self.keep_every is not None and self.keep_newest is None:
            raise ValueError("keep_every thins out what keep_newest does not keep: give keep_newest too")
        return self


class DeviceSection(Section):
    """Where the run computes."""

    kind: Device | Literal["auto"] = "auto"
    """auto uses CUDA if a device is visible."""
    deterministic: bool = False
    """On CUDA, use kernels whose results do not depend on timing; slower. On CPU everything is deterministic anyway."""


class RunConfig(Section):
    """The whole configuration of a run."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    warmup: WarmupSection = WarmupSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    train: TrainerConfig
    sync: SyncSection = SyncSection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    workers: WorkersSection = WorkersSection()
    device: DeviceSection = DeviceSection()
    storage: StorageSection = StorageSection()

    def meaning(self) -> dict[str, JsonValue]:
        """The part that decides the result; a run can be continued only with an equal one.

        Runtime settings are left out: see `tasks.config.identity`. Data given by URL is identified by the
        digests of the `prepare` stage instead.
        """
        return meaning(self.model_dump(mode="json"))


def load_config(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (any fsspec URL) and apply `section.key=value` overrides.

    Raises:
        InputError: the file cannot be read or parsed, a key is unknown, or a value cannot be used.
    """
    try:
        with fsspec.open(path, "rb") as file:
            document = tomllib.loads(file.read().decode())  # pyright: ignore[reportAttributeAccessIssue]
    except FileNotFoundError:
        raise InputError(f"configuration {shown_text(path)} does not exist: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"configuration {shown_text(path)} is not valid TOML: {error}") from None
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"configuration {shown_text(path)} cannot be read: {shown_text(str(error))}") from None
    for override in overrides:
        apply_override(document, override)
    return parse_config(document, path)


def parse_config(document: Mapping[str, Any], where: str) -> RunConfig:
    """Validate a parsed document.

    Raises:
        InputError: all errors, one per line.
    """
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise InputError(f"configuration {shown_text(where)} cannot be used:\n{explained(error)}") from None


def explained(error: ValidationError) -> str:
    """What is wrong with a configuration, one line each, without the secrets in it."""
    return "\n".join(f"  {_explain(dict(item))}" for item in error.errors())


def apply_override(document: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into a parsed document.

    Raises:
        InputError: it has another form, or names a value as a section.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {shown_setting(override)!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word: --set reward.function=regex
    table = document
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {shown_setting(override)!r}: {key!r} is a value, not a section")
    table[keys[-1]] = value


def _explain(item: dict[str, Any]) -> str:
    place = ".".join(str(step) for step in item["loc"]) or "document"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _names_at(item["loc"][:-1]), n=1, cutoff=0.0)
        return f"{place}: unknown key; did you mean {'.'.join([*map(str, item['loc'][:-1]), *near])!r}?"
    if item["type"] == "missing":
        return f"{place}: this key is required"
    if item["type"] == "value_error":  # ours: it includes the input
        text = item["msg"].removeprefix("Value error, ")
        return text if text.startswith(place) else f"{place}: {text}"
    return f"{place}: {item['msg']} (given: {shown(item['input'], str(item['loc'][-1]))!r})"


def _without_credentials(url: str | None, key: str, info: ValidationInfo) -> str | None:
    if url is not None and has_credentials(url) and info.context != FROM_STORAGE:
        raise ValueError(
            f"{key} is a URL with credentials, which would be stored with the run: leave them to the environment, or "
            'give the whole URL by reference, as "env:NAME", and export NAME'
        )
    return url


def _names_at(location: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for step in location:
        annotation = model.model_fields[str(step)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)
