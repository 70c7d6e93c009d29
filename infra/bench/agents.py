"""The bench of conversations: sessions of an environment, or of a harness that drives them through the endpoint of a
rollout, against bare vLLM that is given the recorded turns with the same dependencies between them."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infra.bench.bare_engine import Session, Sessions, Took, processor_seconds
from infra.bench.cases import CASES, CaseName, Speaker
from infra.bench.rollout import bare_engine
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError
from tasks.config.document import parse_config
from tasks.config.environment import Settings
from tasks.config.run import RunConfig
from tasks.data.generated import generate_model
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import Sampling
from tasks.environments.conversation import Played, Task
from tasks.environments.hosting import host_processes
from tasks.environments.scores import play_metrics
from tasks.stages.conversations import play
from tasks.stages.names import Stage
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.interface import EngineHandle
from trainer_core.config import Device

_TOLD = 16  # tokens of a question, and of each result of a tool
_MARKS = 8  # at most, that the template writes around one
_SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
_FUNCTIONS: Mapping[Speaker, str] = {"client": "agent.py:drive", "environment": "asker.py:Asker"}
_CACHE_MIB: dict[CaseName, int] = {"tiny": 512, "0.75b": 30 << 10, "4b": 20 << 10}


class AgentsBench(BaseModel):
    """Medians over rounds."""

    device: str
    """Name of the device."""
    case: CaseName
    """The model."""
    by: Speaker
    """Side that asks: an OpenAI client through the endpoint, or an environment whose steps the rollout calls."""
    sessions: int
    """Conversations, all at a time."""
    turns: int
    """Answers of each."""
    tokens: int
    """Tokens of each answer."""
    wait_s: float
    """Seconds of the tool after each answer but the last."""
    pairs: int
    """Rounds of each side, in turns."""
    tokens_per_s: float
    """Rate of the sessions."""
    bare_tokens_per_s: float
    """Rate of vLLM alone."""
    ratio: float
    """Median over pairs of the first by the second."""
    ratio_spread: float
    """Largest minus smallest of these ratios."""
    engine_s: float
    """Processor time of the engine that the sessions ask in a round, in s."""
    rollout_s: float
    """Processor time of the rollout's process in a round: requests, sessions, calls of the engine, events, in s."""
    harness_s: float
    """Processor time of the processes of the harness or the environments in a round, in s."""
    bare_engine_s: float
    """Processor time of vLLM alone in a round, in s."""
    rollout_ms: float
    """`rollout_s` for each answer, in ms."""
    harness_ms: float
    """`harness_s` for each answer, in ms: on CPU these processes compete with the engine."""
    engine_ratio: float
    """Processor time of vLLM alone by that of the engine that the sessions ask."""
    prefix_cache_hits: float
    """Share of the full blocks of earlier turns that the engine took from its prefix cache."""


@dataclass(frozen=True)
class _Size:
    name: CaseName
    by: Speaker
    sessions: int
    turns: int
    tokens: int
    wait_s: float

    @property
    def length(self) -> int:
        return self.turns * (self.tokens + _TOLD + _MARKS)


class _Round(BaseModel):
    """Cost of one round of sessions."""

    seconds: float
    rollout_s: float
    harness_s: float
    engine_s: float
    hits: float
    sessions: Sessions


def bench_agents(
    case_name: CaseName | None, by: Speaker, pairs: int, sessions: int, turns: int, tokens: int | None, wait_s: float
) -> AgentsBench:
    """Measure both sides in turns, `pairs` times each after one round that does not count.

    Raises:
        InputError: a number is below 1.
        WorkerLost: a side did not start, or died.
    """
    settings = Settings.from_environment()
    device = settings.device("auto")
    name: CaseName = case_name or ("tiny" if device == "cpu" else "0.75b")
    size = _Size(name, by, sessions, turns, tokens or (128 if name == "tiny" else 256), wait_s)
    if min(pairs, sessions, turns, size.tokens) < 1:
        raise InputError("a bench of no pairs, sessions, turns or tokens measures nothing: give at least 1 of each")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as root:
        model = Path(folder)
        _make_model(model, size)
        config = _config(size, folder)
        with (
            Fleet("bench", config, Cluster(settings)) as fleet,
            bare_engine(fleet.engine_spec(model), settings) as bare,
        ):
            (engine,) = fleet.engines(model)
            ours = _driven(engine, config, TextCodec.from_directory(model), model, open_root(root), size)
            rounds = [_pair(ours, bare) for _ in range(pairs + 1)][1:]
    return _result(device, size, rounds)


def _pair(ours: Callable[[], _Round], bare: Callable[[Sessions], Took]) -> tuple[_Round, Took]:
    """The recorded turns of a round are what bare vLLM is given."""
    played = ours()
    return played, bare(played.sessions)


def _make_model(folder: Path, size: _Size) -> None:
    """Random weights, and a tokenizer with as many words and a chat template."""
    positions = -(-size.length // 256) * 256
    shape = CASES[size.name].model.model_copy(update={"max_positions": positions})
    generate_model(folder, shape, seed=0)
    words = [*_SPECIAL, *(f"w{number}" for number in range(shape.vocabulary - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.add_special_tokens({"additional_special_tokens": list(_SPECIAL[2:])})
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def _config(size: _Size, model: str) -> RunConfig:
    shape = CASES[size.name].model
    arguments = {"turns": size.turns, "wait_s": size.wait_s, "told": _TOLD, "words": shape.vocabulary - len(_SPECIAL)}
    function = str(Path(__file__).with_name(_FUNCTIONS[size.by]))
    return parse_config(
        {
            "model": {"source": model},
            "data": {"generate": {}},
            "environment": {
                "function": function, "arguments": arguments, "turns": size.turns, "processes": size.sessions,
                "retries": 0,
            },
            "engine": {
                "max_model_len": size.length, "max_num_seqs": size.sessions, "kv_cache_mib": _CACHE_MIB[size.name],
                "precision": CASES[size.name].precision,
            },
            "train": {"max_length": size.length, "optimizer": {"learning_rate": 1e-6}},
        },
        "the bench",
    )  # fmt: skip


def _driven(
    engine: EngineHandle, config: RunConfig, codec: TextCodec, model: Path, root: Root, size: _Size
) -> Callable[[], _Round]:
    """Rounds of sessions, each with prompts of its own."""
    this, numbers = psutil.Process(), itertools.count()
    processes = [psutil.Process(one) for one in engine.processes()]
    sampling = Sampling(max_tokens=size.tokens)

    def run() -> _Round:
        number = next(numbers)
        key = layout.piece_key("bench", number, Stage.ROLLOUT, 0, "00000")
        tasks = [
            Task(row, f"{number}-{row}", 0, {"id": f"{number}-{row}"}, [1], (number << 20) + row, row)
            for row in range(size.sessions)
        ]
        found, pieces, watch = list[Played](), [(key, tasks)], _Watch()
        engine_s = sum(map(processor_seconds, processes))
        own, clock = this.cpu_times(), time.perf_counter()
        play(root, [engine], None, config, codec, sampling, model, pieces, lambda _, some: found.extend(some), watch)
        seconds, after = time.perf_counter() - clock, this.cpu_times()
        return _Round(
            seconds=seconds,
            rollout_s=after.user + after.system - own.user - own.system,
            harness_s=watch.harness_s,
            engine_s=sum(map(processor_seconds, processes)) - engine_s,
            hits=play_metrics([one.kept for one in found]).get("prefix_cache_hits", 0.0),
            sessions=Sessions(
                sessions=[_recorded(one, task.seed) for one, task in zip(found, tasks, strict=True)],
                wait_s=size.wait_s,
                sampling=sampling,
            ),
        )

    return run


class _Watch:
    """Looks now and then at the processor time of the host of the harness, and of those of its processes that ended."""

    def __init__(self) -> None:
        self._host: psutil.Process | None = None
        self.harness_s = 0.0

    def __call__(self) -> None:
        if self._host is None:
            self._host = psutil.Process(*host_processes().values())
        self.harness_s = sum(self._host.cpu_times()[:4])


def _recorded(played: Played, seed: int) -> Session:
    """All tokens before each answer."""
    row = played.trajectory
    whole, first = row.tokens.tolist(), len(row.prompt)
    answers = [turn for turn in row.turns if turn["role"] == "assistant"]
    return Session(prompts=[whole[: first + turn["begin"]] for turn in answers], seed=seed)


def _result(device: Device, size: _Size, rounds: Sequence[tuple[_Round, Took]]) -> AgentsBench:
    tokens = size.sessions * size.turns * size.tokens
    answers = size.sessions * size.turns

    def median(values: Iterator[float]) -> float:
        return statistics.median(list(values))

    ratios = [bare.seconds / ours.seconds for ours, bare in rounds]
    return AgentsBench(
        device=device,
        case=size.name,
        by=size.by,
        sessions=size.sessions,
        turns=size.turns,
        tokens=size.tokens,
        wait_s=size.wait_s,
        pairs=len(rounds),
        tokens_per_s=median(tokens / ours.seconds for ours, _ in rounds),
        bare_tokens_per_s=median(tokens / bare.seconds for _, bare in rounds),
        ratio=statistics.median(ratios),
        ratio_spread=max(ratios) - min(ratios),
        engine_s=median(ours.engine_s for ours, _ in rounds),
        rollout_s=median(ours.rollout_s for ours, _ in rounds),
        harness_s=median(ours.harness_s for ours, _ in rounds),
        bare_engine_s=median(bare.processor_s for _, bare in rounds),
        rollout_ms=median(1000 * ours.rollout_s / answers for ours, _ in rounds),
        harness_ms=median(1000 * ours.harness_s / answers for ours, _ in rounds),
        engine_ratio=median(bare.processor_s / ours.engine_s for ours, bare in rounds),
        prefix_cache_hits=median(ours.hits for ours, _ in rounds),
    )
