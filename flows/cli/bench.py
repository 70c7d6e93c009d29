"""`ratchet bench train`, `memory`, `rollout`, `sync` and `overhead`."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import Json
from flows.views.output import Output
from storage.errors import InputError
from tasks.bench.cases import CaseName, SyncCaseName
from tasks.bench.memory import bench_memory
from tasks.bench.train import bench_train
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import child_python_path
from tasks.config.run import TransportChoice

_OVERHEAD = PROJECT_ROOT / "infra" / "bench" / "overhead.py"


def bench_train_command(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model and samples; by default what suits the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    json: Json = False,
) -> int:
    """Measure a training step of Ratchet against the plain one of megatron-core."""
    with Output(json=json) as output:
        found = bench_train(case, pairs)
        output.result(found, _lines(found))
    return 0


def bench_memory_command(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model; by default what suits the device.")] = None,
    json: Json = False,
) -> int:
    """Measure what the trainer can give up while engines sample, and that its updates stay the same."""
    with Output(json=json) as output:
        found = bench_memory(case)
        output.result(found, _lines(found))
    return 0


def bench_rollout_command(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model and responses; by default what suits the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    samples: Annotated[int | None, Parameter(help="Samples of a round; by default the case's.")] = None,
    json: Json = False,
) -> int:
    """Measure a rollout of Ratchet against bare vLLM with the same settings."""
    from tasks.bench.rollout import bench_rollout  # imports Ray

    with Output(json=json) as output:
        found = bench_rollout(case, pairs, samples)
        output.result(found, _lines(found))
    return 0


def bench_sync_command(
    *,
    case: Annotated[SyncCaseName | None, Parameter(help="What is synced; by default what suits the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    transport: Annotated[TransportChoice, Parameter(help="As the setting `sync.transport`.")] = "auto",
    json: Json = False,
) -> int:
    """Measure a weight sync of Ratchet against megatron-bridge's export into vLLM's own reload."""
    from tasks.bench.sync import bench_sync  # imports Ray

    with Output(json=json) as output:
        found = bench_sync(case, pairs, transport)
        output.result(found, _lines(found))
    return 0


def bench_overhead_command(
    *,
    iterations: Annotated[int, Parameter(help="Iterations between two readings.", validator=Number(gte=1))] = 20,
    repeats: Annotated[int, Parameter(help="Readings; the median is reported.", validator=Number(gte=1))] = 3,
    json: Json = False,
) -> int:
    """Measure what the workflow costs beyond the work: Prefect's client, requests to S3, status, database."""
    if not _OVERHEAD.is_file():
        raise InputError(f"{_OVERHEAD} does not exist: run the bench from a checkout of Ratchet")
    # in its own process: it replaces the workers of runs by small ones
    options = [f"--iterations={iterations}", f"--repeats={repeats}", *(["--json"] if json else [])]
    command = [sys.executable, "-m", "infra.bench.overhead", *options]
    return subprocess.run(command, check=False, cwd=PROJECT_ROOT, env=child_python_path()).returncode


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
