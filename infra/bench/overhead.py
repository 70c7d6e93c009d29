"""Cost of the workflow beyond the work: `ratchet bench overhead [--json]`.

The real loop and stages run over workers of a few numpy lines, once called directly and once as a Prefect flow with a
server of its own. The difference in CPU time of this process is the overhead of Prefect's client and of the reports.
Requests are counted at a local S3 server. It needs a checkout with the development packages.
"""

import argparse
import contextlib
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import BaseModel, ConfigDict

ACCOUNT, PARTITION = "123456789012", "aws"  # moto's
LONG = 5000


class Overhead(BaseModel):
    """All figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_ms_per_stage: float
    """CPU time of the client for a stage as a Prefect task, beyond the stage itself."""
    cpu_s_per_iteration: float
    """CPU time of the client for an iteration in a flow run, beyond an iteration whose stages are called directly."""
    cpu_s_per_iteration_direct: float
    """The latter."""
    s3_requests_per_iteration: float
    """Requests at the end of an iteration, beyond its parts and manifests: reading its row back, retention."""
    s3_requests_whole_iteration: float
    """Requests of a whole iteration beyond parts and manifests."""
    status_5000_s: float
    """Wall time of the status of a run of 5,000 iterations on local files, all imported; the worst of five."""
    status_5000_s3_requests: int
    """Requests for the same from S3."""
    database_mib_per_1000_iterations: float
    """Growth of the server's SQLite database, in MiB, before anything is deleted."""


def main() -> int:
    """Measure and print; the last line of the output is the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20, help="iterations between two readings")
    parser.add_argument("--repeats", type=int, default=3, help="readings; the median is reported")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        found = measured(Path(folder), given.iterations, given.repeats)
    values = found.model_dump()
    lines = [json.dumps(values)] if given.json else [f"{name:<34}{value:.4g}" for name, value in values.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def measured(folder: Path, iterations: int, repeats: int) -> Overhead:
    """All figures, measured in `folder`."""
    direct = cpu_of_direct_iterations(folder / "direct", iterations, repeats)
    with served(folder / "prefect") as database:
        stage = cpu_of_tasks(repeats)
        flow, growth = cpu_of_flow_iterations(folder / "flow", database, iterations, repeats)
    end, whole = s3_requests(folder / "s3")
    make_long_run(folder / "long")
    return Overhead(
        cpu_ms_per_stage=1000 * stage,
        cpu_s_per_iteration=flow - direct,
        cpu_s_per_iteration_direct=direct,
        s3_requests_per_iteration=end,
        s3_requests_whole_iteration=whole,
        status_5000_s=max(status_seconds(folder / "long") for _ in range(5)),
        status_5000_s3_requests=status_requests(folder / "long"),
        database_mib_per_1000_iterations=1000 * growth / 2**20,
    )


def cpu_of_direct_iterations(folder: Path, iterations: int, repeats: int) -> float:
    """CPU seconds of an iteration whose stages are called directly: between a short run and longer ones."""
    from storage.backends.root import open_root
    from tests.small.driving import driver

    root = open_root(str(folder / "runs"))

    def run_to(last: int) -> None:
        driver(root, small(last), folder / f"scratch-{last}").drive()

    return per_iteration(run_to, iterations, repeats, lambda: time.process_time())[0]


def cpu_of_flow_iterations(folder: Path, database: Path, iterations: int, repeats: int) -> tuple[float, float]:
    """CPU seconds of an iteration in a flow run, and the growth of the database in bytes."""
    from flows import run
    from flows.server.temporary import drain
    from tests.flows.site import small as site

    folder.mkdir()
    run.open_context = site.small_context

    def run_to(last: int) -> None:
        run.run("small", str(folder / "runs"), small(last))
        drain()

    figures = per_iteration(run_to, iterations, repeats, lambda: time.process_time(), lambda: size_of(database))
    return figures[0], figures[1]


def per_iteration(
    run_to: Callable[[int], None], iterations: int, repeats: int, *meters: Callable[[], float]
) -> list[float]:
    """Increase of each meter by an iteration: a flow run of many iterations against one of a single iteration.

    So the cost of starting and ending, which has its own place, does not count.
    """
    run_to(1)
    last, found = 1, []
    for _ in range(repeats):
        taken = []
        for count in (1, iterations + 1):
            last += count
            before = [meter() for meter in meters]
            run_to(last)
            taken.append([meter() - value for meter, value in zip(meters, before, strict=True)])
        found.append([(many - one) / iterations for one, many in zip(*taken, strict=True)])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def cpu_of_tasks(repeats: int, tasks: int = 50) -> float:
    """CPU seconds that a stage costs because it is a Prefect task."""
    from prefect import flow

    from flows.server.temporary import drain
    from flows.subflows import as_task
    from tasks.stages.names import Stage
    from tasks.stages.views import Performed, Rollouts
    from tests.flows.runs import make_manifest

    view = Rollouts(make_manifest("small", 1, Stage.ROLLOUT))

    @flow(name="bench", persist_result=False)
    def body(count: int) -> None:
        for iteration in range(count):
            as_task(Stage.ROLLOUT, iteration, lambda: Performed(view, reused=False), ())

    def cpu(count: int) -> float:
        before = time.process_time()
        body(count)
        drain()
        return time.process_time() - before

    cpu(1)
    return statistics.median((cpu(tasks + 1) - cpu(1)) / tasks for _ in range(repeats))


@contextlib.contextmanager
def served(home: Path) -> Iterator[Path]:
    """A Prefect server of its own; gives its database."""
    home.mkdir()
    os.environ |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.server.temporary import TemporaryServer
    from tasks.config.environment import prepare_process

    prepare_process()
    with TemporaryServer() as server:
        server.wait(300)
        with temporary_settings({PREFECT_API_URL: server.url}):
            yield home / "prefect.db"


def size_of(database: Path) -> int:
    """Bytes of a SQLite database and its write-ahead log."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        pages, size, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size", "freelist_count")
        )
    return (pages - free) * size


def s3_requests(folder: Path, iterations: int = 4) -> tuple[float, float]:
    """Requests at the end of an iteration, and of a whole one, without those for its parts and manifests."""
    from flows import driving
    from storage.write_behind import WriteBehind
    from tests.small import driving as small_driving
    from tests.storage.s3 import s3_server

    class AtOnce(WriteBehind):
        """An outbox that waits for each job, so that requests belong to what is done."""

        def add(self, job: Callable[[], object], name: Hashable = None) -> Any:
            added = super().add(job, name)
            self.settle()
            return added

    with s3_server() as server:
        asked, ends, conclude = server.faults.requests, [], driving.conclude

        def counted(*given: Any) -> None:
            before = len(asked)
            conclude(*given)
            ends.append((before, len(asked)))

        root = server.root("overhead")
        config = small(iterations + 2, "storage.keep_newest=1")
        with mock.patch.object(driving, "conclude", counted), mock.patch.object(small_driving, "WriteBehind", AtOnce):
            small_driving.driver(root, config, folder).drive()
        chosen = range(3, iterations + 2)  # retention deletes a state at the end of each
        last = statistics.mean(beyond(asked[slice(*ends[number])]) for number in chosen)
        whole = statistics.mean(beyond(asked[ends[number - 1][1] : ends[number][1]]) for number in chosen)
    return last, whole


def beyond(requests: list[str]) -> int:
    """Number of requests that are not for a part or a manifest itself."""
    from storage import layout

    keys = (one.partition(" ")[2].partition("?")[0].partition("/overhead/")[2] for one in requests)
    return sum(not (key and (layout.is_part(f"/{key}") or layout.is_manifest(key))) for key in keys)


def make_long_run(folder: Path, iterations: int = LONG) -> None:
    """The manifests of a run of 5,000 iterations."""
    from storage import records
    from storage.backends.root import open_root
    from tasks.config.stored import record_config
    from tasks.stages.names import WORKFLOW, Stage
    from tests.flows.runs import make_manifest

    root = open_root(str(folder))
    digest = record_config(root, "long", small(iterations))
    for iteration in range(iterations + 1):
        for stage in map(Stage, WORKFLOW.stages_of(iteration)):
            manifest = make_manifest("long", iteration, stage, config_digest=digest)
            path = folder / manifest.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(records.seal(manifest))


def status_seconds(folder: Path) -> float:
    """Wall time of one status of the long run."""
    from flows.views.status import read_status
    from storage.backends.root import open_root

    root, before = open_root(str(folder)), time.perf_counter()
    status = read_status(root, "long")
    taken = time.perf_counter() - before
    assert status.complete
    return taken


def status_requests(folder: Path) -> int:
    """Requests to S3 for one status of the long run."""
    from moto.s3.models import s3_backends

    from flows.views.status import read_status
    from tests.storage.s3 import BUCKET, s3_server

    with s3_server() as server:
        backend = s3_backends[ACCOUNT][PARTITION]
        for path in folder.rglob("*"):
            if path.is_file():  # past the server, which would take minutes
                backend.put_object(BUCKET, f"long/{path.relative_to(folder)}", path.read_bytes())
        root, before = server.root("long"), len(server.faults.requests)
        assert read_status(root, "long").complete
        return len(server.faults.requests) - before


def small(iterations: int, *settings: str) -> Any:
    """The configuration of the small run."""
    from tests.small.config import small_config

    return small_config([f"run.iterations={iterations}", *settings])


if __name__ == "__main__":
    sys.exit(main())
