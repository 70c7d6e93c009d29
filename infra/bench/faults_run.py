"""A run of the bench of failures, as `ratchet run` does it, whose ranks note what they do.

python -m infra.bench.faults_run FOLDER
"""

import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from flows import run
from flows.cli.launch import Order, drive
from infra.bench.faults_rank import note, timed_start
from infra.bench.loop import CONFIG, ROOT, RUN
from storage.errors import RatchetError, told
from tasks.config.run import RunConfig
from tasks.workers import fleet
from tasks.workers.ranks import RankActors

_start_trainers, _end = fleet.start_trainers, RankActors.end


def main() -> int:
    """Drive the run that the folder describes."""
    folder = Path(sys.argv[1])
    config = RunConfig.model_validate_json((folder / CONFIG).read_text())

    def started(*given: Any, **options: Any) -> Any:
        note(folder, "asked")
        return _start_trainers(*given, start=partial(timed_start, folder), **options)

    def ended(self: RankActors, spared: Collection[int] = ()) -> None:
        note(folder, "noticed")
        _end(self, spared)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    fleet.start_trainers, RankActors.end = started, ended
    try:
        root = run.ready(RUN, str(folder / ROOT), config)
        drive(Order(config, RUN, root.url, again=""), root, say)
    except RatchetError as error:
        say(told(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
