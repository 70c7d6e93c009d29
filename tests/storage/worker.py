"""A process that works on a run as a flow does, with small stage bodies, and can kill itself at a given point.

ROOT POINT [FIRST | "fork"]: POINT is the number of the system call (fsync, link or unlink, together) before which it
sends itself SIGKILL, or -1. Given FIRST, it begins with that iteration, and cleans up before the first stage and again
between the parts and the manifest of each. Given "fork", it only makes run "child" from run "parent".

worker.py reads these arguments from its input: see `tests.storage.forks`.
"""

import itertools
import os
import shutil
import signal
import sys

from storage import layout, records
from storage.backends.root import open_root
from storage.manifest import Manifest, commit, find
from storage.ownership.lease import hold
from storage.parts import PartWriter
from storage.unfinished import find_piece, keep_piece
from storage.upkeep.fork import fork
from storage.upkeep.retention import Retention, catch_up, collect
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.forks import serve
from tests.storage.runs import DOCUMENT
from tests.storage.tables import manifest

ITERATIONS, PIECES = 1, 2
RETENTION = Retention(newest=2)
STAGES = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN)


def work(url: str, first: int | None = None) -> None:
    root, before = open_root(url), None
    records.publish(root, layout.run_config_key("run"), DOCUMENT)
    with hold(root, "run", "worker", 3600.0) as lease:
        if first is not None:
            catch_up(root, WORKFLOW, "run", RETENTION, fence=lease)
        for iteration in range(first or 1, (first or 1) + ITERATIONS):
            for stage in STAGES:
                found = find(root, "run", iteration, stage)
                if found is None:
                    made = do(root, iteration, stage, before)
                    if first is not None:
                        collect(root, WORKFLOW, "run", RETENTION, apply=True, fence=lease)
                    found = commit(root, made, lease)
                before = found
    sys.stdout.write(f"calls {next(Killer.calls)}\n")


def make_fork(url: str) -> None:
    fork(open_root(url), WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    sys.stdout.write(f"calls {next(Killer.calls)}\n")


def do(root, iteration: int, stage: Stage, before: Manifest | None) -> Manifest:
    sys.stdout.write(f"done {stage} {iteration}\n")
    sys.stdout.flush()
    writer = PartWriter(root, "run", iteration, stage)
    if stage == Stage.ROLLOUT:
        parts = tuple(piece(writer, str(number)) for number in range(PIECES))
    else:
        folder = root.folder.parent / "scratch"
        shutil.rmtree(folder, ignore_errors=True)  # files of an earlier process may have become parts
        folder.mkdir()
        for rank in range(2):
            (folder / f"{rank}.distcp").write_bytes(f"{stage} {iteration} {rank}".encode() * 1000)
        parts = writer.write_files(folder, ["0.distcp", "1.distcp"])
    return manifest(stage, iteration, parts, inputs={"before": before.digest} if before else {})


def piece(writer: PartWriter, name: str):
    part = find_piece(writer, name)
    if part is None:
        sys.stdout.write(f"piece {name} {writer.iteration}\n")
        sys.stdout.flush()
        part = keep_piece(writer, name, writer.write_bytes("groups.arrow", name.encode() * 1000))
    return part


class Killer:
    """Counts the calls that make things durable or visible, and kills the process before one of them."""

    calls = itertools.count()  # also of threads: none is lost, and no number comes twice

    def __init__(self, point: int) -> None:
        self.point = point

    def before(self, call):
        def counted(*arguments, **options):
            if next(Killer.calls) == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted


def begin(url: str, point: str, *first: str) -> None:
    killer = Killer(int(point))
    for name in ("fsync", "link", "unlink"):
        setattr(os, name, killer.before(getattr(os, name)))
    make_fork(url) if first == ("fork",) else work(url, *map(int, first))


if __name__ == "__main__":
    serve(begin)
