"""`ratchet bench train`."""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import Json
from flows.views.output import Output
from tasks.bench.cases import CaseName
from tasks.bench.train import TrainBench, bench_train


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


def _lines(found: TrainBench) -> list[str]:
    shown = {name: value for name, value in found.model_dump().items() if value is not None}
    width = max(map(len, shown))
    return [f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}"
            for name, value in shown.items()]  # fmt: skip
