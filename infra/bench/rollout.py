"""Ratchet's rollout against bare vLLM: the same model, settings, prompts and lengths, in turns."""

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from pydantic import BaseModel

from infra.bench.bare_engine import ANSWER, Requests, Sessions, Took, processor_seconds
from infra.bench.cases import CASES, Case, CaseName
from infra.bench.memory_limit import bandwidth, bytes_read
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, WorkerLost
from tasks.config.document import parse_config
from tasks.config.environment import Settings, child_python_path, engine_environment
from tasks.config.rollout import IncrementsSection
from tasks.config.run import RunConfig
from tasks.data.generated import generate_model
from tasks.engine.protocol import EngineSpec, Every, Sampling
from tasks.engine.vllm import Runner
from tasks.engine.vllm.engine import Engine
from tasks.stages.names import Stage
from tasks.stages.samples import Growth
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import Batch, Growing, sample
from trainer_core.config import Device

_GROUP = 8  # samples of a prompt
_SAMPLES: dict[CaseName, int] = {"tiny": 256, "0.75b": 512, "4b": 256}
_CACHE_MIB: dict[CaseName, int] = {"tiny": 64, "0.75b": 32 << 10, "4b": 20 << 10}  # of two engines on a card
_CACHE_MIB_APART: dict[CaseName, int] = {"tiny": 64, "0.75b": 62 << 10, "4b": 55 << 10}  # of an engine on a card
_MEAN_SHARE = 4  # mixed responses have a quarter of the most tokens on average


class Lengths(BaseModel):
    """Medians over rounds. On CPU rates are per second of processor time, of all processes of a side, which other
    processes do not change much."""

    tokens_per_s: float
    """Rate of Ratchet's engine through its own calls."""
    generate_tokens_per_s: float
    """Rate of LLM.generate with seeds and log-probabilities, as Ratchet asks for them."""
    plain_tokens_per_s: float
    """Rate of LLM.generate without them."""
    ratio: float
    """Median over pairs of the first by the second."""
    ratio_spread: float
    """Largest minus smallest of these ratios."""
    plain_ratio: float
    """Median over pairs of the first by the third."""
    plain_ratio_spread: float
    """Largest minus smallest of these ratios."""
    wall_ratio: float
    """The ratio by the wall clock."""
    memory_share: float | None
    """Ratchet's rate over the one at which the card's memory could give the weights once a step and the keys and values
    of each token; None on CPU."""


class RolloutBench(BaseModel):
    """Measurements of one model."""

    device: str
    """Name of the device."""
    cards: int
    """Cards: with two or more, Ratchet and vLLM have one each, else they share it."""
    case: CaseName
    """The model."""
    samples: int
    """Samples of a round, all sampled together."""
    tokens: int
    """Most tokens of a response."""
    pairs: int
    """Rounds of each side, in turns."""
    bandwidth: float | None
    """Of the card's memory, in bytes a second, as it copies; None on CPU."""
    runner: Runner
    """vLLM's model runner in Ratchet's engine."""
    bare_runner: Runner
    """The one of bare vLLM, its default."""
    equal: Lengths
    """Measurements with responses that all have the most tokens."""
    mixed: Lengths
    """Measurements with a few responses that are much longer than most."""


class Compared(BaseModel):
    """Medians over rounds; rates as those of `Lengths`."""

    tokens_per_s: float
    """Rate with increments, each of which is stored durably in a local folder; or with FP8 numbers."""
    without_tokens_per_s: float
    """Rate without them."""
    ratio: float
    """Median over pairs of the first by the second."""
    ratio_spread: float
    """Largest minus smallest of these ratios."""


class InTurns(BaseModel):
    """Two ways to sample, of one model; fields as those of `RolloutBench`."""

    device: str
    case: CaseName
    samples: int
    tokens: int
    pairs: int
    runner: Runner
    equal: Compared
    mixed: Compared


class Fp8Bench(InTurns):
    """An FP8 engine against one in bf16, on one card."""


class IncrementsBench(InTurns):
    """Cost of increments."""

    every: int
    """Tokens after which a response is stored again."""


Side = Callable[[Requests], Took]


def bench_rollout(
    case_name: CaseName | None, pairs: int, samples: int | None = None, tokens: int | None = None
) -> RolloutBench:
    """Measure Ratchet and LLM.generate in turns, `pairs` times each after one round that does not count.

    Without a case it is the one that fits the device: "tiny" without a GPU, "0.75b" with one.

    Raises:
        InputError: `pairs`, `samples` or `tokens` is below 1, or the model has too few positions.
        WorkerLost: a side did not start, or died.
    """
    settings = Settings.from_environment()
    device = settings.device("auto")
    name, case, count = _sizes(device, case_name, pairs, samples, tokens)
    with tempfile.TemporaryDirectory() as folder:
        generate_model(Path(folder), case.model, seed=0)
        bytes_per_s = bandwidth(settings) if device == "cuda" else None
        config = _config(folder, name, case, count, apart=len(settings.gpus) > 1)
        with (
            Fleet("bench", config, Cluster(settings)) as fleet,
            bare_engine(
                fleet.engine_spec(Path(folder)), settings
            ) as bare,  # starts beside ours: each compiles for a minute
        ):
            (engine,) = fleet.engines(Path(folder))
            sides = (_ours(engine, device), bare, lambda requests: bare(requests.model_copy(update={"plain": True})))
            equal, mixed = (_race(sides, _requests(case, count, mixed), pairs) for mixed in (False, True))
            (runner,) = engine.results(engine.submit(Engine.runner))
    return RolloutBench(
        device=device,
        cards=len(settings.gpus),
        case=name,
        samples=count,
        tokens=case.response,
        pairs=pairs,
        bandwidth=bytes_per_s,
        runner=runner,
        bare_runner=equal[1][0].runner,
        equal=_lengths(equal, device, case, bytes_per_s),
        mixed=_lengths(mixed, device, case, bytes_per_s),
    )


def bench_increments(
    case_name: CaseName | None, pairs: int, samples: int | None, tokens: int | None, every: int
) -> IncrementsBench:
    """Measure a rollout whose responses are stored `every` so many tokens against one whose are not, in turns, as
    `bench_rollout`, which says what is raised."""
    settings = Settings.from_environment()
    device = settings.device("auto")
    name, case, count = _sizes(device, case_name, pairs, samples, tokens, every)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as root:
        generate_model(Path(folder), case.model, seed=0)
        with Fleet("bench", _config(folder, name, case, count, apart=True), Cluster(settings)) as fleet:
            (engine,) = fleet.engines(Path(folder))
            sides = (_ours(engine, device, _storing(open_root(root), every)), _ours(engine, device))
            races = [_race(sides, _requests(case, count, mixed), pairs) for mixed in (False, True)]
    equal, mixed = (_compared(race, device) for race in races)
    shown = {"device": device, "case": name, "samples": count, "tokens": case.response, "pairs": pairs, "every": every}
    return IncrementsBench(**shown, runner=races[0][0][0].runner, equal=equal, mixed=mixed)


def bench_fp8(case_name: CaseName | None, pairs: int, samples: int | None, tokens: int | None) -> Fp8Bench:
    """Measure an engine with FP8 numbers and one in bf16, which share a card, in turns, as `bench_rollout`, which says
    what is raised."""
    settings = Settings.from_environment()
    device = settings.device("auto")
    name, case, count = _sizes(device, case_name, pairs, samples, tokens)
    cluster = Cluster(settings)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_fleets:
        generate_model(Path(folder), case.model, seed=0)
        configs = [_config(folder, name, case, count, False, quantization) for quantization in ("fp8", None)]
        fleets = [open_fleets.enter_context(Fleet("bench", config, cluster)) for config in configs]
        for fleet in fleets:  # both, before the first of them ends Ray
            open_fleets.callback(fleet.close)
        sides = [_ours(fleet.engines(Path(folder))[0], device) for fleet in fleets]
        races = [_race(sides, _requests(case, count, mixed), pairs) for mixed in (False, True)]
    equal, mixed = (_compared(race, device) for race in races)
    shown = {"device": device, "case": name, "samples": count, "tokens": case.response, "pairs": pairs}
    return Fp8Bench(**shown, runner=races[0][0][0].runner, equal=equal, mixed=mixed)


def _storing(root: Root, every: int) -> Callable[[int], Growing]:
    """For each round with so many batches, how their increments are told and stored."""
    rounds = itertools.count()

    def growing(batches: int) -> Growing:
        number = next(rounds)
        pieces = [layout.piece_key("bench", number, Stage.ROLLOUT, 0, f"{batch:05d}") for batch in range(batches)]
        return Growing(Every(every, IncrementsSection().seconds), Growth(root, pieces).keep)

    return growing


def _sizes(
    device: Device, case_name: CaseName | None, pairs: int, samples: int | None, tokens: int | None, every: int = 1
) -> tuple[CaseName, Case, int]:
    """The case by name, with its lengths, and the number of samples. Raises InputError as `bench_rollout`."""
    if any(number is not None and number < 1 for number in (pairs, samples, tokens, every)):
        raise InputError(
            f"{pairs} pairs of {samples} samples of {tokens} tokens measure nothing: give at least 1 of each"
        )
    name: CaseName = case_name or ("tiny" if device == "cpu" else "0.75b")
    case = CASES[name]
    case = case.model_copy(update={"response": tokens or case.response})
    if case.length + 8 > case.model.max_positions:
        raise InputError(
            f"{name} has {case.model.max_positions} positions: give at most "
            f"{case.model.max_positions - case.prompt - 8} tokens, not {case.response}"
        )
    return name, case, samples or _SAMPLES[name]


def _config(
    model: str, name: CaseName, case: Case, together: int, apart: bool, quantization: str | None = None
) -> RunConfig:
    return parse_config(
        {
            "model": {"source": model},
            "data": {"generate": {}},
            "engine": {
                "max_model_len": case.length + 8,
                "max_num_seqs": together,
                "kv_cache_mib": (_CACHE_MIB_APART if apart else _CACHE_MIB)[name],
                "precision": case.precision,
                **({} if quantization is None else {"quantization": quantization}),
            },
            "train": {"max_length": case.length, "optimizer": {"learning_rate": 1e-6}},
        },
        "the bench",
    )


def _requests(case: Case, count: int, mixed: bool) -> Requests:
    """Prompts, each for a group of samples. Mixed lengths come from stop tokens, so that they are about geometric."""
    generator = np.random.default_rng(int(mixed))
    vocabulary = case.model.vocabulary
    prompts = generator.integers(vocabulary // 2, vocabulary, (-(-count // _GROUP), case.prompt)).tolist()
    stops = range(3, 3 + vocabulary * _MEAN_SHARE // case.response) if mixed else ()
    return Requests(
        prompts=[prompt for prompt in prompts for _ in range(_GROUP)][:count],
        seeds=generator.integers(0, 1 << 62, count).tolist(),
        sampling=Sampling(max_tokens=case.response, stop_token_ids=tuple(stops)),
    )


def _ours(engine: EngineHandle, device: Device, growing: Callable[[int], Growing | None] = lambda _: None) -> Side:
    """Batches of a rollout: on a GPU one for each prompt, the finest size of a stored part. `growing` gets their
    number."""
    processes = [psutil.Process(), *map(psutil.Process, engine.processes())]
    (runner,) = engine.results(engine.submit(Engine.runner))

    def used() -> float:
        here, *others = processes
        own = here.cpu_times()
        return own.user + own.system + sum(map(processor_seconds, others))

    def run(requests: Requests) -> Took:
        size = len(requests.prompts) if device == "cpu" else _GROUP
        parts = [slice(first, first + size) for first in range(0, len(requests.prompts), size)]
        batches = [Batch(requests.prompts[part], requests.seeds[part]) for part in parts]
        found: list[pa.RecordBatch] = []
        clock, before = time.perf_counter(), used()
        told = growing(len(batches))
        sample([engine], batches, requests.sampling, lambda _, completions: found.append(completions), growing=told)
        seconds, processor_s = time.perf_counter() - clock, used() - before
        lengths = [one["response_tokens"].value_lengths().to_numpy() for one in found]
        return Took(seconds=seconds, processor_s=processor_s, lengths=np.concatenate(lengths).tolist(), runner=runner)

    return run


@contextmanager
def bare_engine(spec: EngineSpec, settings: Settings) -> Iterator[Callable[[Requests | Sessions], Took]]:
    """vLLM's `LLM` in a process of its own, on the last card."""
    environment = {**child_python_path(), **engine_environment(spec.device, settings.gpus[-1:], local=True)}
    if spec.device == "cuda":  # as vLLM comes
        del environment["VLLM_USE_V2_MODEL_RUNNER"], environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    command = [sys.executable, "-m", "infra.bench.bare_engine", spec.model_dump_json()]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def run(requests: Requests | Sessions) -> Took:
        stdin.write(f"{requests.model_dump_json()}\n")
        stdin.flush()
        for line in stdout:
            if line.startswith(ANSWER):
                return Took.model_validate_json(line.removeprefix(ANSWER))
        raise WorkerLost(f"bare vLLM ended with {process.wait()}: run `{' '.join(command[:3])} ...` to see why")

    try:
        yield run
    finally:
        stdin.close()
        stdout.close()
        process.wait()


def _race(sides: Sequence[Side], requests: Requests, pairs: int) -> list[list[Took]]:
    """Rounds of each side, in turns; the first of each compiles, allocates and warms up."""
    rounds = [[side(requests) for side in sides] for _ in range(pairs + 1)][1:]
    return [list(took) for took in zip(*rounds, strict=True)]


def _rate(took: Took, device: Device) -> float:
    return took.tokens / (took.processor_s if device == "cpu" else took.seconds)


def _compared(race: list[list[Took]], device: Device) -> Compared:
    stored, without = ([_rate(took, device) for took in side] for side in race)
    ratios = np.divide(stored, without)
    rates = {"tokens_per_s": statistics.median(stored), "without_tokens_per_s": statistics.median(without)}
    return Compared(**rates, ratio=float(np.median(ratios)), ratio_spread=float(np.ptp(ratios)))


def _lengths(race: list[list[Took]], device: Device, case: Case, bytes_per_s: float | None) -> Lengths:
    def rate(took: Took) -> float:
        return _rate(took, device)

    def wall(took: Took) -> float:
        return took.tokens / took.seconds

    def ratios(other: int, of: Callable[[Took], float]) -> list[float]:
        return [of(ours) / of(theirs) for ours, theirs in zip(race[0], race[other], strict=True)]

    def share(took: Took) -> float:
        read = bytes_read(case.model, case.precision, case.prompt, np.array(took.lengths))
        return read / (bytes_per_s or 1.0) / took.seconds

    ours, seeded, plain = (statistics.median(map(rate, side)) for side in race)
    return Lengths(
        tokens_per_s=ours,
        generate_tokens_per_s=seeded,
        plain_tokens_per_s=plain,
        ratio=statistics.median(ratios(1, rate)),
        ratio_spread=float(np.ptp(ratios(1, rate))),
        plain_ratio=statistics.median(ratios(2, rate)),
        plain_ratio_spread=float(np.ptp(ratios(2, rate))),
        wall_ratio=statistics.median(ratios(1, wall)),
        memory_share=None if bytes_per_s is None else statistics.median(map(share, race[0])),
    )
