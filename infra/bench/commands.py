"""The commands `ratchet bench ...`. Torch, Ray and vLLM wait until a bench needs them."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl, Settings
from flows.views.output import Output
from infra.bench.cases import LAYOUTS, SIDES, CaseName, KillName, LayoutName, SideName, Speaker, SyncCaseName
from storage.backends.root import open_root
from storage.errors import InputError
from storage.upkeep.catalog import require_run
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import child_python_path
from tasks.config.run import TransportChoice

app = App(name="bench", help="Measure parts of Ratchet on this machine.")


@app.command
def storage(
    *,
    repeats: Annotated[int, Parameter(help="Measurements per figure; the median is reported.")] = 5,
    run: Annotated[str | None, Parameter(help="Also report the cost of durability in this run.")] = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Measure writing, reading and committing on this machine."""
    options = [f"--repeats={repeats}", *(["--json"] if json else [])]
    if run is not None:
        store = open_root(root)
        require_run(store, run)
        options += [f"--run={run}", f"--root={store.url}"]
    # in its own process, which is pinned to one thread before anything heavy is imported
    return _process("infra.bench.storage", options)


@app.command
def train(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model and samples; by default the one for the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    fp8: Annotated[bool, Parameter(help="Multiply FP8 numbers, on both sides.", negative=())] = False,
    json: Json = False,
) -> int:
    """Measure a training step of Ratchet against the plain one of megatron-core."""
    from infra.bench.train import bench_train

    with Output(json=json) as output:
        found = bench_train(case, pairs, fp8)
        output.result(found, _lines(found))
    return 0


@app.command
def memory(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model; by default the one for the device.")] = None,
    json: Json = False,
) -> int:
    """Measure the memory that the trainer frees while engines sample, and check that its updates stay the same."""
    from infra.bench.memory import bench_memory

    with Output(json=json) as output:
        found = bench_memory(case)
        output.result(found, _lines(found))
    return 0


@app.command
def rollout(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model and responses; by default the one for the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 7,
    samples: Annotated[int | None, Parameter(help="Samples of a round; by default the case's.")] = None,
    tokens: Annotated[int | None, Parameter(help="Most tokens of a response; by default the case's.")] = None,
    increments: Annotated[
        int | None, Parameter(help="Tokens after which responses are stored: measure what that costs.")
    ] = None,
    fp8: Annotated[
        bool, Parameter(help="Measure an FP8 engine against one in bf16, on one card.", negative="")
    ] = False,
    json: Json = False,
) -> int:
    """Measure a rollout of Ratchet against vLLM's LLM.generate, with and without seeds and log-probabilities; or with
    increments against the same without; or with FP8 numbers against bf16."""
    from infra.bench.rollout import bench_fp8, bench_increments, bench_rollout  # imports Ray

    if fp8 and increments is not None:
        raise InputError(f"--fp8 and --increments {increments} are two measurements: give one of them")
    with Output(json=json) as output:
        sizes = case, pairs, samples, tokens
        if increments is not None:
            found = bench_increments(*sizes, increments)
        else:
            found = bench_fp8(*sizes) if fp8 else bench_rollout(*sizes)
        output.result(found, _lines(found))
    return 0


@app.command
def agents(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model; by default the one for the device.")] = None,
    by: Annotated[Speaker, Parameter(help="Side that asks: an OpenAI client, or an environment's steps.")] = "client",
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 3,
    sessions: Annotated[int, Parameter(help="Conversations, all at a time.")] = 256,
    turns: Annotated[int, Parameter(help="Answers of each.")] = 4,
    tokens: Annotated[int | None, Parameter(help="Tokens of an answer; by default 128 of tiny, else 256.")] = None,
    wait: Annotated[float, Parameter(help="Seconds of the tool after each answer.")] = 0.05,
    json: Json = False,
) -> int:
    """Measure conversations of several turns against bare vLLM that is given their recorded turns."""
    from infra.bench.agents import bench_agents  # imports Ray

    with Output(json=json) as output:
        found = bench_agents(case, by, pairs, sessions, turns, tokens, wait)
        output.result(found, _lines(found))
    return 0


@app.command
def sync(
    *,
    case: Annotated[SyncCaseName | None, Parameter(help="Model and layout; by default the one for the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    transport: Annotated[TransportChoice, Parameter(help="As the setting `sync.transport`.")] = "auto",
    json: Json = False,
) -> int:
    """Measure a weight sync of Ratchet against megatron-bridge's export into vLLM's own reload."""
    from infra.bench.sync import bench_sync  # imports Ray

    with Output(json=json) as output:
        found = bench_sync(case, pairs, transport)
        output.result(found, _lines(found))
    return 0


@app.command
def loop(
    config: Annotated[str | None, Parameter(help="A configuration; by default random weights for the device.")] = None,
    /,
    *,
    layout: Annotated[tuple[LayoutName, ...], Parameter(help="Only these layouts; may be repeated.")] = LAYOUTS,
    iterations: Annotated[int, Parameter(help="Iterations of each run; those after the first count.")] = 4,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Measure iterations of real runs: shared cards, own cards, and own cards with rollouts ahead."""
    from infra.bench.loop import bench_loop

    with Output(json=json) as output:
        found = bench_loop(config, settings, layout, iterations, output.say)
        output.result(found, _lines(found))
    return 0


@app.command
def faults(
    *,
    iterations: Annotated[int, Parameter(help="Iterations of each run.", validator=Number(gte=1))] = 4,
    every: Annotated[int, Parameter(help="It dies in every so many iterations.", validator=Number(gte=1))] = 2,
    kill: Annotated[
        KillName, Parameter(help="The last rank at its first gradient, or the engine amid a rollout.")
    ] = "rank",
    seconds: Annotated[
        float,
        Parameter(
            help="Seconds that rewards of an iteration take; with --kill engine, steps of its longest response.",
            validator=Number(gte=0),
        ),
    ] = 0,
    ranks: Annotated[int, Parameter(help="Trainer ranks, one pipeline.", validator=Number(gte=1))] = 2,
    case: Annotated[CaseName, Parameter(help="Model and samples.")] = "tiny",
    side: Annotated[tuple[SideName, ...], Parameter(help="Only these, and the undisturbed run.")] = SIDES,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Measure effective training time with failures, against starting everything again, and where the seconds go."""
    from infra.bench.faults import Faults, bench_faults

    with Output(json=json) as output:
        order = Faults(iterations=iterations, every=every, kill=kill, seconds=seconds, ranks=ranks, case=case,
                       measured=side)  # fmt: skip
        found = bench_faults(order, settings, output.say)
        output.result(found, _lines(found))
    return 0


@app.command
def overhead(
    *,
    iterations: Annotated[int, Parameter(help="Iterations between two readings.", validator=Number(gte=1))] = 20,
    repeats: Annotated[int, Parameter(help="Readings; the median is reported.", validator=Number(gte=1))] = 3,
    json: Json = False,
) -> int:
    """Measure the cost of the workflow beyond the work: Prefect's client, requests to S3, status, database."""
    small = PROJECT_ROOT / "tests" / "small"
    if not small.is_dir():
        raise InputError(f"{small} does not exist: run this bench from a checkout of Ratchet")
    # in its own process: it replaces the workers of runs by small ones
    options = [f"--iterations={iterations}", f"--repeats={repeats}", *(["--json"] if json else [])]
    return _process("infra.bench.overhead", options)


def _process(module: str, options: list[str]) -> int:
    # -P: a folder `infra` of the user in the working directory would hide ours
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *options], check=False, env=child_python_path()
    ).returncode


def _lines(found: BaseModel) -> list[str]:
    shown = {name: value for name, value in _flat(found.model_dump()) if value is not None}
    width = max(map(len, shown))
    return [f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}"
            for name, value in shown.items()]  # fmt: skip


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", one) for inner, one in _flat(value))
        else:
            yield name, value
