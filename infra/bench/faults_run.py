"""A run of the bench of failures, as `ratchet run` does it, whose ranks or engine note what they do.

python -m infra.bench.faults_run FOLDER
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flows import run
from flows.cli.launch import Order, drive
from infra.bench.faults_engine import failing_engine, order_kill
from infra.bench.faults_marks import Plan, note
from infra.bench.faults_rank import timed_start
from infra.bench.loop import CONFIG, ROOT, RUN
from storage import kill_points
from storage.errors import RatchetError, told
from tasks.config.run import RunConfig
from tasks.engine.start import start_engine
from tasks.workers import fleet
from tasks.workers.ranks import RankActors

_start_trainers, _start, _end = fleet.start_trainers, RankActors.start, RankActors.end


def main() -> int:
    """Drive the run that the folder describes."""
    folder = Path(sys.argv[1])
    config, plan = RunConfig.model_validate_json((folder / CONFIG).read_text()), Plan.of(folder)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    _have_noted(folder, plan)
    try:
        root = run.ready(RUN, str(folder / ROOT), config)
        with kill_points.observed(partial(order_kill, folder, plan)):
            drive(Order(config, RUN, root.url, again=""), root, say)
    except RatchetError as error:
        say(told(error))
        return 1
    return 0


def _have_noted(folder: Path, plan: Plan) -> None:
    """Have the driver note what it does, and the processes that it starts for what the plan kills."""

    def started(*given: Any, **options: Any) -> Any:
        note(folder, "asked")
        return _start_trainers(*given, start=partial(timed_start, folder), **options)

    def began(
        self: RankActors, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], deadline_s: float
    ) -> None:
        if factory is start_engine:
            note(folder, "asked")
            factory = partial(failing_engine, folder)
        _start(self, factory, arguments, deadline_s)

    def ended(self: RankActors, spared: Collection[int] = ()) -> None:
        note(folder, "noticed")
        _end(self, spared)

    if plan.kill == "rank":
        fleet.start_trainers = started
    else:
        RankActors.start = began
    RankActors.end = ended


if __name__ == "__main__":
    sys.exit(main())
