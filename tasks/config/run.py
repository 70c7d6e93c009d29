"""The configuration of a run: frozen models. Imports without torch."""

import json
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, create_model, model_validator

from storage.ids import check_run_name
from tasks.config.data import DataSection
from tasks.config.keys import NONE, decided
from tasks.config.model import EnginesSection, ModelSection
from tasks.config.report import ReportSection
from tasks.config.retrain import RetrainSection
from tasks.config.reward import EnvironmentSection, RewardSection
from tasks.config.rollout import RolloutSection
from tasks.config.section import Section, unusable_numbers
from trainer_core.config import Device, OptimizerConfig, Precision, TrainerConfig
from trainer_core.effects import Unused, without_effect
from trainer_core.marks import FUNCTION, RUNTIME, decides


class RunSection(Section):
    """Name and length of the run."""

    name: Annotated[str, AfterValidator(check_run_name)] | None = None
    """Id of the run below the storage root; also set by `--run`."""
    iterations: int = Field(default=1, ge=0)
    """RL iterations after the preparation (iteration 0). May be raised later to continue."""
    seed: Annotated[int, decides("prepare", "rollout", "train")] = 0
    """Source of every other seed: model, data order, samples, trainer."""

    retries: int = Field(default=2, ge=0)
    """Automatic retries of a stage after a process that computes for it was lost."""
    outage_s: float = Field(default=900.0, ge=0)
    """Seconds for which each operation of the store is retried while the store does not answer."""


class WarmupSection(Section):
    """Supervised steps before the first iteration, by the same trainer."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 starts RL from the model as it is."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per step."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Its own optimizer and schedule; RL starts with a fresh one."""


_ABSENT: Any = Field(default=None, exclude_if=operator.not_)  # runs without one do not have the key in their meaning
EngineCards = Literal["shared", "own"]
TransportChoice = Literal["auto", "memory", "cuda", "collective", "files"]


class SyncSection(Section):
    """Transport of weights to the engines, and the proof of their arrival."""

    transport: TransportChoice = "auto"
    """Shared `memory` of the host, buffers on `cuda` cards that engines open, `collective` broadcasts (gloo on CPU; on
    cards NCCL, which needs one for each process: `engine.cards = "own"`), or safetensors `files`. `auto`: `cuda` if all
    processes share one card, or engines' cards can read the trainer's; else `memory`."""
    arena_mib: int = Field(default=256, ge=1)
    """Weights travel in buckets of at most this size; each sender has two such buffers. A larger tensor travels alone,
    and then all buffers have its size. On a card they are kept from one sync to the next. MiB."""
    in_flight: Literal["abort", "wait", "keep"] = "abort"
    """Treatment of requests in flight: `abort` drops them, `wait` completes them first, with `keep` they go on with the
    new weights. The training loop never has requests in flight."""
    probe_sequences: int = Field(default=8, ge=1)
    """Held-out prompts with answers whose log-probabilities engine and trainer must agree on."""
    max_mean_difference: float | None = Field(default=None, gt=0)
    """Allowed mean |engine - trainer| over the probe tokens, nat. By default 0.001 if both compute in fp32,
    0.2 with FP8 on one side, else 0.03."""
    max_difference: float | None = Field(default=None, gt=0)
    """Allowed largest |engine - trainer|, nat: by default 0.005 if both are fp32, 1.4 with FP8 on one side, or 0.1."""


_PASS = (
    'Which answers pass, as a condition over `reward` and the components of the reward: `"right >= 1"`. By default '
    "those with the reward 1, if every reward is 0 or 1; else there is a mean reward, and no pass rate."
)
# a keyword of Python cannot be written as a field
_FIELDS: Any = {"pass": (str | None, Field(default=None, description=_PASS))}


class EvaluateSection(create_model("_Passing", __base__=Section, **_FIELDS)):
    """Greedy answers to held-out prompts."""

    every: int = Field(default=1, ge=0)
    """Evaluate every N iterations, and after the last; 0 disables it, as does a run without held-out prompts."""
    prompts: int = Field(default=256, ge=1)
    """Number of held-out prompts, counted from the first."""

    @property
    def passing(self) -> str | None:
        """The value of `evaluate.pass`."""
        return dict(self)["pass"]


ENGINES = "ratchet.engines"  # entry points by which an installed package offers engines
_SAMPLES = decides("rollout", "weight-sync", "evaluate")


class EngineSection(Section):
    """The rollout engines. With a deterministic engine only `precision` changes results, `tensor` their last bits."""

    count: int = Field(default=1, ge=1)
    """Engines (Ray actors). A rollout, and an evaluation, is spread over all of them."""
    tensor: Literal[1, 2, 4] = 1
    """Processes of one engine, with a card each, over which every layer is split."""
    cards: EngineCards = "shared"
    """Cards of the engines: `shared`, from the first on, as the trainer's ranks; or their `own`, the next after the
    trainer's, one for each process. No effect on CPU."""
    max_model_len: int = Field(default=128, ge=8)
    """Longest sequence, prompt and response, in tokens. Only a fork may change it if `[environment]` is given."""
    max_num_seqs: int = Field(default=512, ge=1)
    """Sequences decoded together."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """Key-value cache of a card, MiB. By default what `gpu_memory_utilization` leaves; on CPU 128."""
    precision: Annotated[Precision, _SAMPLES] = "fp32"
    """Type of the engine's weights and activations. It decides what is sampled: only a fork may change it."""
    # runs with their defaults have none of these keys in their meaning
    quantization: Annotated[Literal["fp8"] | None, _SAMPLES] = Field(default=None, exclude_if=operator.not_)
    """`fp8`: compute linear layers with FP8 numbers, made of the trained weights at each sync. Only on cards with FP8
    units, with dense models and `precision = "bf16"`. It decides what is sampled: only a fork may change it."""
    adapter: Annotated[Literal["merged", "live"], _SAMPLES] = Field(default="merged", exclude_if="merged".__eq__)
    """Adapters of `train.lora` in the engines: `merged` sends the sums of weights and adapters at each sync; with
    `live` engines get the frozen weights once and then the adapters alone, which vLLM's layers add. With dense models
    and ranks up to 512. It decides the last bits of what is sampled: only a new run may change it."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of a card that engines may use, divided by those on it; the trainer needs the rest. No effect on CPU."""
    cuda_graphs: bool = True
    """Capture CUDA graphs: faster steps, a start a minute longer. No effect on CPU or with `device.deterministic`."""
    async_scheduling: bool = True
    """Schedule a step while the one before computes. No effect on CPU, or with `device.deterministic`."""
    sleep: bool = False
    """Give the card's memory to the trainer while it trains: the weights go to memory of the host, the key-value cache
    is dropped, and both come back before the weights are synced. No effect on CPU."""
    own_process: bool | None = None
    """Run vLLM's scheduler in a process of its own. By default so on a GPU, unless `device.deterministic`; with
    `tensor` above 1 always."""
    # vLLM runs have neither key in their meaning
    function: Annotated[str | None, _SAMPLES, FUNCTION] = Field(default=None, exclude_if=operator.not_)
    """Class of an engine of your own, in place of vLLM: `file.py:NAME` with a file beside the configuration or in the
    working directory, `package.module:NAME`, or an entry point of the group `ratchet.engines`."""
    source: Annotated[str, _SAMPLES] = Field(default="", exclude_if=operator.not_)
    """Digest of the source of `function`, which is filled in when a configuration is read: another source is another
    run. If it is given, the source must have it."""

    @property
    def numbers(self) -> str:
        """Name of the numbers that the engines compute with, which decide what they sample."""
        return self.quantization or self.precision

    @model_validator(mode="after")
    def _usable(self) -> "EngineSection":
        others = {"quantization": self.quantization is not None, "tensor": self.tensor > 1}
        for name in (name for name, given in others.items() if given and self.adapter == "live"):
            fact = f'adapter = "live" adds adapters to whole weights as they arrived, and {name} ='
            repair = f'leave engine.{name} out, or set engine.adapter = "merged"'
            raise ValueError(f"{fact} {json.dumps(dict(self)[name])} changes or divides them: {repair}")
        if self.quantization is not None and self.precision != "bf16":
            fact = f'quantization = "{self.quantization}" is computed beside bf16, and precision is "{self.precision}"'
            raise ValueError(f'{fact}: set engine.precision = "bf16"')
        return self


class WorkersSection(Section):
    """Deadlines after which computing processes are lost, and others that wait for places; they change no result."""

    standby: int = Field(default=0, ge=0)
    """Processes that have done their imports, 1 GB each, and wait for the place of a rank that dies; and as many for
    engines, on cards each for those of one, in turn. On a Ray cluster they wait beside the first; not with cards."""
    start_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds for trainer ranks or an engine to come up: imports, the model, CUDA graphs."""
    call_deadline_s: float = Field(default=14400.0, gt=0)
    """Seconds for one call: all training of an iteration, loading weights, saving a state."""
    step_deadline_s: float = Field(default=1800.0, gt=0)
    """Seconds in which an engine that samples must end a step and answer; the first may compile kernels."""


class StorageSection(Section):
    """Storing and retention of train states. Those of iteration 0 and of the newest stored one are always kept."""

    save_every: int = Field(default=1, ge=1)
    """Store the states of iterations divisible by this number, and of the last. The others are made again when they are
    needed, by the same updates on the stored samples, and compared with their recorded identity; on CUDA that takes
    `device.deterministic`."""

    keep_newest: int | None = Field(default=None, ge=1)
    """Keep the states of this many of the newest iterations; all if not given."""
    keep_every: int | None = Field(default=None, ge=1)
    """Beyond those, keep the states of iterations divisible by this number."""


class DeviceSection(Section):
    """Device of the run."""

    kind: Device | Literal["auto"] = "auto"
    """auto uses CUDA if a device is visible."""
    deterministic: bool | Literal["trainer"] = False
    """On CUDA, use kernels whose results do not depend on timing; slower. `trainer` leaves the engines at full speed,
    and suffices to make states again (`storage.save_every`). On CPU everything is deterministic anyway."""


class RunConfig(Section):
    """The whole configuration of a run."""

    run: Annotated[RunSection, RUNTIME] = RunSection()
    model: Annotated[ModelSection, decides("prepare", "train")]
    data: Annotated[DataSection, decides("prepare", "rollout")]
    warmup: Annotated[WarmupSection, decides("prepare", "train")] = WarmupSection()
    rollout: Annotated[RolloutSection, decides("rollout")] = RolloutSection()
    reward: Annotated[RewardSection, decides("reward", "rescore", "evaluate")] = RewardSection()
    environment: Annotated[EnvironmentSection | None, decides("rollout", "reward", "evaluate")] = _ABSENT
    train: Annotated[TrainerConfig, decides("train")]
    sync: Annotated[SyncSection, RUNTIME] = SyncSection()
    evaluate: Annotated[EvaluateSection, RUNTIME] = EvaluateSection()
    engine: Annotated[EngineSection, RUNTIME] = EngineSection()
    engines: Annotated[EnginesSection | None, decides("prepare", "reward", "rescore", "evaluate")] = _ABSENT
    workers: Annotated[WorkersSection, RUNTIME] = WorkersSection()
    device: Annotated[DeviceSection, RUNTIME] = DeviceSection()
    storage: Annotated[StorageSection, RUNTIME] = StorageSection()
    report: Annotated[ReportSection, RUNTIME] = ReportSection()
    retrain: Annotated[RetrainSection | None, decides("select", "train")] = None

    @property
    def scores(self) -> bool:
        """Responses are scored: for the training, or for an evaluation."""
        evaluated = self.retrain is None and self.evaluate.every > 0 and self.data.evaluates
        return self.train.policy.needs_rewards or evaluated

    @model_validator(mode="after")
    def _usable(self) -> "RunConfig":
        if found := list(unusable_numbers(self.model_dump())) or without_effect(self, UNUSED):
            raise ValueError("\n  ".join(found))
        if (every := self.storage.keep_every) is not None and every % self.storage.save_every:
            fact = f"storage.keep_every = {every} keeps states that storage.save_every = {self.storage.save_every} does"
            raise ValueError(f"{fact} not store: give a multiple of it")
        if self.train.experts.replay and self.retrain is None:  # stored samples have their routes already
            others = {
                "[environment]": self.environment is not None,
                "engine.function": self.engine.function is not None,
                'rollout.updates = "in-flight"': self.rollout.updates == "in-flight",
            }
            for name in (name for name, given in others.items() if given):
                fact = "train.experts.replay = true needs the experts of every sampled token, which are not told with"
                raise ValueError(f"{fact} {name}: leave that out, or set it to false")
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_held_out(cls, document: Any) -> Any:
        """Without held-out prompts nothing is evaluated, unless `evaluate.every` is given: then that is an error."""
        data = document.get("data") if isinstance(document, dict) else None
        if not isinstance(data, dict) or data.get("train") is None or data.get("held_out") or data.get("hold_out"):
            return document
        evaluate = document.get("evaluate", {})
        if not isinstance(evaluate, dict) or "every" in evaluate:
            return document
        return {**document, "evaluate": {**evaluate, "every": 0}}

    @property
    def newest_states(self) -> int | None:
        """Number of the newest iterations whose train states are kept; None for all. A rollout ahead may have to be
        sampled again, by weights that were trained before the newest."""
        newest = self.storage.keep_newest
        return newest if newest is None else max(newest, self.rollout.ahead + 1)

    def meaning(self) -> dict[str, JsonValue]:
        """The part that decides the result; a run can be continued only with an equal one. Runtime settings are left
        out (`tasks.config.identity`). Data given by URL is identified by the digests of the `prepare` stage instead."""
        return decided(self.model_dump(mode="json"), (RunConfig,), None, NONE)


def _unreached(config: RunConfig) -> str | None:
    """The reason why no response is long enough for `train.policy.overlong`."""
    overlong = config.train.policy.overlong
    longest = min(config.rollout.max_tokens, config.engine.max_model_len - 1)
    longest = longest if config.retrain is None else config.train.max_length - 1
    beyond = overlong.first is not None and overlong.first > longest
    return f"responses of at most {longest} tokens, where it begins at {overlong.first}" if beyond else None


def _with_samples(most: int) -> Callable[[RunConfig], str | None]:
    def without(config: RunConfig) -> str | None:
        few = config.retrain is None and config.rollout.samples <= most
        return f"rollout.samples = {config.rollout.samples}" if few else None

    return without


def _all_groups(config: RunConfig) -> str | None:
    most, section = config.train.policy.most_groups, config.rollout
    more = section.most_prompts
    if most is None or config.retrain is not None or most < (more or section.prompts):
        return None
    return f"rollout.{'most_' if more else ''}prompts = {more or section.prompts}, which are no more"


def _drawn_at_once(config: RunConfig) -> str | None:
    section = config.rollout
    fewer = section.most_prompts is not None and section.most_prompts <= section.prompts
    return f"rollout.prompts = {section.prompts}, which are no fewer" if fewer else None


def _not_older(config: RunConfig) -> str | None:
    section = config.rollout
    bounded = section.max_staleness is None or section.updates == "in-flight" or section.max_staleness < section.ahead
    return None if bounded else f'rollout.updates = "between", by which all tokens are {section.ahead} updates old'


def _split(config: RunConfig) -> str | None:
    given = config.engine.own_process is False and config.engine.tensor > 1
    return f"engine.tensor = {config.engine.tensor}, whose processes are always their own" if given else None


_ONE_PROCESS = "engine.function, whose engine is one process"
_NO_REST = "keep_newest not given, whose rest it thins out"


def _because(why: str, holds: Callable[[RunConfig], bool]) -> Callable[[RunConfig], str | None]:
    return lambda config: why if holds(config) else None


_PLAYED = "[environment], which gives the rewards"
_UNREWARDED = "train.policy.distill.reward_weight = 0 and nothing evaluated"


def _off(config: RunConfig) -> str | None:
    if config.evaluate.every:
        return None
    return "evaluate.every = 0" if config.data.evaluates else "no held-out prompts (data.hold_out or data.held_out)"


SWITCHED = {"evaluate.every": ("evaluate.prompts",), "warmup.steps": ("warmup.batch_size", "warmup.optimizer")}
"""Settings whose 0 switches something off, with the settings that have no effect then."""

UNUSED: tuple[Unused[RunConfig], ...] = (
    *(Unused(name, _off) for name in SWITCHED["evaluate.every"]),
    *(Unused(name, _because("warmup.steps = 0", lambda c: not c.warmup.steps)) for name in SWITCHED["warmup.steps"]),
    Unused("train.policy.overlong", _unreached),
    Unused("train.policy.loss.best", _with_samples(1)),
    Unused("train.policy.loss.pairs", _with_samples(2)),
    Unused("train.policy.most_groups", _all_groups),
    Unused("rollout.most_prompts", _drawn_at_once),
    *(
        Unused(f"rollout.{name}", _because('rollout.updates = "between"', lambda c: c.rollout.updates == "between"))
        for name in ("pause_tokens", "open_prompts")
    ),
    Unused("rollout.max_staleness", _not_older),
    *(
        Unused(f"reward.{name}", _because(_PLAYED, lambda c: c.environment is not None))
        for name in ("function", "functions", "arguments", "weights", "batch", "deadline_s", "processes")
    ),
    *(
        Unused(f"reward.{name}", _because(_UNREWARDED, lambda c: c.retrain is None and not c.scores))
        for name in RewardSection.model_fields
    ),
    Unused("engine.own_process", _split),
    Unused("engine.tensor", _because(_ONE_PROCESS, lambda c: c.engine.function is not None)),
    Unused("engine.quantization", _because("engine.function", lambda c: c.engine.function is not None)),
    Unused("engine.adapter", _because("train.lora not given", lambda c: c.train.lora is None)),
    Unused("engine.adapter", _because("engine.function", lambda c: c.engine.function is not None)),
    Unused("engine.source", _because("engine.function not given", lambda c: c.engine.function is None)),
    *(
        Unused(f"model.{name}", _because("model.generate", lambda c: c.model.generate is not None))
        for name in ("download", "token", "accept")
    ),
    Unused("storage.keep_every", _because(_NO_REST, lambda c: c.storage.keep_newest is None)),
)
"""Settings that others leave without effect."""
