"""Ratchet's rollout against bare vLLM, on one device: the same model, settings, prompts and seeds."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from pydantic import BaseModel

from infra.bench.bare_engine import ANSWER, Requests, Took, processor_seconds
from infra.bench.cases import CASES, Case, CaseName
from storage.errors import InputError, WorkerLost
from tasks.config.document import parse_config
from tasks.config.environment import Settings, child_python_path, engine_environment
from tasks.config.run import RunConfig
from tasks.data.generated import generate_model
from tasks.engine.protocol import EngineSpec, Sampling
from tasks.workers.cluster import Cluster
from tasks.workers.engines import EngineHandle
from tasks.workers.fleet import Fleet
from tasks.workers.placement import engine_cards
from tasks.workers.sampling import Batch, sample
from trainer_core.config import Device

_GROUP = 8  # samples of a prompt
_SAMPLES: dict[CaseName, int] = {"tiny": 256, "0.75b": 512, "4b": 256}
_TOGETHER = 256  # sequences decoded together
_CACHE_MIB: dict[CaseName, int] = {"tiny": 64, "0.75b": 30 << 10, "4b": 20 << 10}  # two engines share a card
_MEAN_SHARE = 4  # mixed responses have a quarter of the most tokens on average


class RolloutBench(BaseModel):
    """Measurements. Rates are medians over rounds; on CPU they are per second of processor time, which other
    processes do not change much, of all processes of a side."""

    device: str
    """Name of the device."""
    case: CaseName
    """The model."""
    samples: int
    """Samples of a round."""
    pairs: int
    """Rounds of each side, in turns."""
    tokens_per_s: float
    """Rate of Ratchet's engine through its own calls; all responses have the most tokens."""
    bare_tokens_per_s: float
    """Rate of vLLM's AsyncLLM: all requests queued, final outputs only."""
    ratio: float
    """Median over pairs of the first by the second."""
    ratio_spread: float
    """Largest minus smallest ratio of a pair."""
    mixed_tokens_per_s: float
    """Rate of Ratchet's engine; a few responses are much longer than most."""
    mixed_bare_tokens_per_s: float
    """Rate of AsyncLLM for these."""
    mixed_ratio: float
    """Median over pairs of the first by the second."""
    wall_ratio: float
    """The ratio by the wall clock."""
    mixed_wall_ratio: float
    """The mixed ratio by the wall clock."""
    generate_tokens_per_s: float
    """Rate of vLLM's LLM.generate, measured afterwards; responses of the most tokens."""
    mixed_generate_tokens_per_s: float
    """Rate of LLM.generate for mixed lengths."""


Side = Callable[[Requests], Took]


def bench_rollout(case_name: CaseName | None, pairs: int, samples: int | None = None) -> RolloutBench:
    """Measure Ratchet and AsyncLLM in turns, `pairs` times each after one round that does not count.

    Without a case it is the one that fits the device: "tiny" without a GPU, "0.75b" with one.

    Raises:
        InputError: `pairs` or `samples` is below 1.
        WorkerLost: a side did not start, or died.
    """
    if pairs < 1 or (samples is not None and samples < 1):
        raise InputError(f"{pairs} pairs of {samples} samples measure nothing: give at least 1 of each")
    settings = Settings.from_environment()
    device = settings.device("auto")
    name: CaseName = case_name or ("tiny" if device == "cpu" else "0.75b")
    case, count = CASES[name], samples or _SAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        generate_model(Path(folder), case.model, seed=0)
        config = _config(folder, name)
        with Fleet("bench", config, Cluster(settings)) as fleet:
            spec = fleet.engine_spec(Path(folder))
            with _bare("async", spec, settings) as bare:  # starts beside ours: on a card each compiles for a minute
                (engine,) = fleet.engines(Path(folder))
                ours = _ours(engine, device)
                races = [_race(ours, bare, _requests(case, count, mixed), pairs) for mixed in (False, True)]
        with _bare("generate", spec, settings) as generate:
            beside = [_measured(generate, _requests(case, count, mixed)) for mixed in (False, True)]
    return _report(name, device, count, races, beside)


def _config(model: str, name: CaseName) -> RunConfig:
    case = CASES[name]
    return parse_config(
        {
            "model": {"source": model},
            "data": {"generate": {}},
            "engine": {
                "max_model_len": case.length + 8,
                "max_num_seqs": _TOGETHER,
                "kv_cache_mib": _CACHE_MIB[name],
                "precision": case.precision,
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


def _ours(engine: EngineHandle, device: Device) -> Side:
    """Batches of a rollout: on a GPU one for each prompt, the finest size of a stored part."""
    processes = [psutil.Process(), *map(psutil.Process, engine.processes())]

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
        sample([engine], batches, requests.sampling, lambda _, completions: found.append(completions))
        seconds, processor_s = time.perf_counter() - clock, used() - before
        tokens = sum(int(one["response_tokens"].value_lengths().to_numpy().sum()) for one in found)
        return Took(seconds=seconds, processor_s=processor_s, tokens=tokens)

    return run


@contextmanager
def _bare(kind: str, spec: EngineSpec, settings: Settings) -> Iterator[Side]:
    cards = engine_cards(settings.gpus, 0, spec.tensor) if spec.device == "cuda" else ()
    own_scheduler = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if spec.device == "cuda" else {}  # vLLM's default
    environment = {**child_python_path(), **engine_environment(spec.device, cards, local=True), **own_scheduler}
    command = [sys.executable, "-m", "infra.bench.bare_engine", kind, spec.model_dump_json()]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def run(requests: Requests) -> Took:
        stdin.write(f"{requests.model_dump_json()}\n")
        stdin.flush()
        for line in stdout:
            if line.startswith(ANSWER):
                return Took.model_validate_json(line.removeprefix(ANSWER))
        raise WorkerLost(f"bare vLLM ended with {process.wait()}: run `{' '.join(command[:4])} ...` to see why")

    try:
        yield run
    finally:
        stdin.close()
        stdout.close()
        process.wait()


def _race(ours: Side, bare: Side, requests: Requests, pairs: int) -> tuple[list[Took], list[Took]]:
    """Rounds of both sides in turns; the first of each compiles, allocates and warms up."""
    rounds = [(ours(requests), bare(requests)) for _ in range(pairs + 1)][1:]
    return [one for one, _ in rounds], [other for _, other in rounds]


def _measured(side: Side, requests: Requests) -> Took:
    side(requests)
    return side(requests)


def _rate(took: Took, device: Device) -> float:
    return took.tokens / (took.processor_s if device == "cpu" else took.seconds)


def _ratios(race: tuple[list[Took], list[Took]], rate: Callable[[Took], float]) -> list[float]:
    return [rate(ours) / rate(bare) for ours, bare in zip(*race, strict=True)]


def _report(
    name: CaseName, device: Device, samples: int, races: list[tuple[list[Took], list[Took]]], beside: list[Took]
) -> RolloutBench:
    def rate(took: Took) -> float:
        return _rate(took, device)

    def wall(took: Took) -> float:
        return took.tokens / took.seconds

    alike, mixed = races
    return RolloutBench(
        device=device,
        case=name,
        samples=samples,
        pairs=len(alike[0]),
        tokens_per_s=statistics.median(map(rate, alike[0])),
        bare_tokens_per_s=statistics.median(map(rate, alike[1])),
        ratio=statistics.median(_ratios(alike, rate)),
        ratio_spread=float(np.ptp(_ratios(alike, rate))),
        mixed_tokens_per_s=statistics.median(map(rate, mixed[0])),
        mixed_bare_tokens_per_s=statistics.median(map(rate, mixed[1])),
        mixed_ratio=statistics.median(_ratios(mixed, rate)),
        wall_ratio=statistics.median(_ratios(alike, wall)),
        mixed_wall_ratio=statistics.median(_ratios(mixed, wall)),
        generate_tokens_per_s=rate(beside[0]),
        mixed_generate_tokens_per_s=rate(beside[1]),
    )
