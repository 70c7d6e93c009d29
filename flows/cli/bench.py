"""`ratchet bench train` and `ratchet bench rollout`."""

from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from flows.cli.options import Json
from flows.views.output import Output
from tasks.bench.cases import CaseName
from tasks.bench.rollout import bench_rollout
from tasks.bench.train import bench_train


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


def bench_rollout_command(
    *,
    case: Annotated[CaseName | None, Parameter(help="Model and responses; by default what suits the device.")] = None,
    pairs: Annotated[int, Parameter(help="Measurements of each side, in turns.")] = 5,
    samples: Annotated[int | None, Parameter(help="Samples of a round; by default the case's.")] = None,
    json: Json = False,
) -> int:
    """Measure a rollout of Ratchet against bare vLLM with the same settings."""
    with Output(json=json) as output:
        found = bench_rollout(case, pairs, samples)
        output.result(found, _lines(found))
    return 0


def _lines(found: BaseModel) -> list[str]:
    shown = {name: value for name, value in found.model_dump().items() if value is not None}
    width = max(map(len, shown))
    return [f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}"
            for name, value in shown.items()]  # fmt: skip
