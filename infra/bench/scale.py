"""Costs of a run of many cards for its one driver, store and Ray head: unit costs of this machine, multiplied.

python -m infra.bench.scale [--json]

CPU seconds are those of the one process that cannot be multiplied: the driver, or the server of Ray's head. It needs a
checkout with the development packages.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from pydantic import BaseModel
from ray.experimental import internal_kv

from infra.bench.storage import manifest
from storage.backends.root import Root, open_root
from storage.digest import bytes_digest
from storage.errors import WorkerLost
from storage.layout import part_key
from storage.manifest import Part, commit, load
from storage.ownership.lease import LEASE_SECONDS, hold
from storage.parts import PartWriter
from tasks.config.environment import Settings
from tasks.stages.names import Stage
from tasks.workers.actors import WorkerGroup, fresh_names, spawn
from tasks.workers.cluster import Cluster
from trainer_core.state.files import tensor_files

CARDS = (64, 512, 4096)
_FEW, _MANY = 64, 1024
_KEYS, _ACTORS, _FILES = 2000, 8, 16
_READS = 3  # by each rank of each rank's address, in a gloo group of 2, 4 and 8: a wait and a get, which waits itself


class Units(BaseModel):
    """Unit costs, measured here."""

    files_per_rank: int
    """Files of a rank in a train state."""
    manifest_bytes_per_file: float
    """Growth of a manifest by one file."""
    manifest_ms_per_file: float
    """CPU of the driver to commit and load it again, for each file."""
    requests_per_file: float
    """S3 requests to store a file, counted at moto's server."""
    requests_of_a_manifest: float
    lease_requests_per_hour: float
    """Of a run, whatever its size."""
    call_ms_per_rank: dict[int, float]
    """CPU of the driver for one rank's part of a call to that many, with its answer."""
    key_ms: float
    """CPU of Ray's head server to set or get a key, by which processes of a cluster meet."""
    actor_ms: float
    """CPU of Ray's head server to start a process."""


class Bill(BaseModel):
    """The units for a number of cards, with a trainer rank on each."""

    cards: int
    state_files: int
    manifest_mb: float
    manifest_s: float
    """CPU of the driver for the manifest of a state."""
    state_requests: float
    """S3 requests for a state; its hosts make them side by side."""
    call_s: float
    """CPU of the driver for a call to all ranks."""
    actors_s: float
    """CPU of Ray's head to start all ranks."""
    meeting_s: float
    """CPU of Ray's head for the keys of one group of all ranks, in which each reads those of all others (gloo)."""
    meeting_one_key_s: float
    """The same where all read one key (NCCL)."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory(prefix="ratchet-scale-") as folder:
        units = measured(Path(folder))
    bills = [bill(units, cards) for cards in CARDS]
    if as_json:
        text = json.dumps({"units": units.model_dump(), "bills": [one.model_dump() for one in bills]})
    else:
        text = "\n".join([*map(str, units), "", *table(bills)])
    sys.stdout.write(f"{text}\n")
    return 0


def measured(folder: Path) -> Units:
    """All unit costs."""
    each_bytes, each_ms = manifest_units(open_root(str(folder / "runs")))
    with Cluster(Settings(ray_address=None, gpus=())) as cluster:
        cluster.start()
        head = _head(cluster)
        names = fresh_names("scale/rank", _ACTORS)
        actors: list[object] = []
        actor_s = cpu_of(head, lambda: actors.extend(started(names)))
        calls = {cards: call_ms(actors, cards) for cards in CARDS}
        key_s = cpu_of(head, keys)
    return Units(
        files_per_rank=len(tensor_files(0)),
        manifest_bytes_per_file=each_bytes,
        manifest_ms_per_file=each_ms,
        **requests(folder),
        call_ms_per_rank=calls,
        key_ms=1000 * key_s / (2 * _KEYS),
        actor_ms=1000 * actor_s / _ACTORS,
    )


def _head(cluster: Cluster) -> psutil.Process:
    """Ray's head server; helpers that Ray starts may end before they are asked for their name."""
    for one in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name() == "gcs_server":
                return one
    raise WorkerLost("Ray's head server is gone")


def bill(units: Units, cards: int) -> Bill:
    """The units, multiplied."""
    files = cards * units.files_per_rank
    return Bill(
        cards=cards,
        state_files=files,
        manifest_mb=files * units.manifest_bytes_per_file / 1e6,
        manifest_s=files * units.manifest_ms_per_file / 1000,
        state_requests=files * units.requests_per_file + units.requests_of_a_manifest,
        call_s=cards * units.call_ms_per_rank[cards] / 1000,
        actors_s=cards * units.actor_ms / 1000,
        meeting_s=_READS * cards * cards * units.key_ms / 1000,
        meeting_one_key_s=cards * units.key_ms / 1000,
    )


def table(bills: list[Bill]) -> list[str]:
    """The bills as lines, one for each figure."""
    return [f"{name:<20}" + "".join(f"{one.model_dump()[name]:>14.4g}" for one in bills) for name in Bill.model_fields]


def manifest_units(root: Root) -> tuple[float, float]:
    """Bytes and CPU milliseconds of one more file in a manifest."""
    sizes, seconds = [], []
    for iteration, count in enumerate((_FEW, _MANY)):
        parts = tuple(part_of(number, iteration) for number in range(count))
        for part in parts:
            root.put_if_absent(part.key, b"x", durable=False)
        before = time.process_time()
        stored = commit(root, manifest(iteration, parts, Stage.TRAIN))
        load(root, stored.key)
        seconds.append(time.process_time() - before)
        sizes.append(len(root.read_bytes(stored.key)))
    more = _MANY - _FEW
    return (sizes[1] - sizes[0]) / more, 1000 * (seconds[1] - seconds[0]) / more


def part_of(number: int, iteration: int) -> Part:
    """The record of a file as ranks write them."""
    name, digest = f"state/rank-{number:05d}.safetensors", bytes_digest(b"x")
    key = part_key("bench", iteration, Stage.TRAIN, name, digest)
    return Part(name=name, key=key, digest=digest, bytes=1)


def requests(folder: Path) -> dict[str, float]:
    """S3 requests, as the server counts them."""
    from tests.storage.s3 import s3_server

    files = folder / "files"
    files.mkdir()
    names = [f"{number}.safetensors" for number in range(_FILES)]
    for name in names:
        (files / name).write_text(name)
    with s3_server() as server:
        asked, root = server.faults.requests, server.root("scale")
        with hold(root, "bench", "bench") as lease:
            begun = len(asked)
            lease.renew()
            renewal = len(asked) - begun
        begun = len(asked)
        parts = PartWriter(root, "bench", 1, Stage.TRAIN).write_files(files, names)
        stored = len(asked)
        commit(root, manifest(1, parts, Stage.TRAIN))
        committed = len(asked)
    return {
        "requests_per_file": (stored - begun) / _FILES,
        "requests_of_a_manifest": committed - stored,
        "lease_requests_per_hour": renewal * 3600 / (LEASE_SECONDS / 3),
    }


def started(names: list[str]) -> list[object]:
    """Actors that answer."""
    actors = spawn(names, [{}] * len(names), detached=False)
    ray.get([actor.where.remote() for actor in actors])
    group = WorkerGroup(names, actors)
    group.start(dict, [()] * len(actors), 600)
    group.submit("copy").wait(600)
    return actors


def call_ms(actors: list[object], ranks: int) -> float:
    """CPU milliseconds of this process for each rank of a call; a few actors stand for all."""
    many = [actors[rank % len(actors)] for rank in range(ranks)]
    group = WorkerGroup([f"rank {rank}" for rank in range(ranks)], many)
    before = time.process_time()
    group.submit("copy").wait(600)
    return 1000 * (time.process_time() - before) / ranks


def keys() -> None:
    """Set keys and get them."""
    for number in range(_KEYS):
        internal_kv._internal_kv_put(f"scale/{number}", b"x" * 64, namespace="scale")
    for number in range(_KEYS):
        internal_kv._internal_kv_get(f"scale/{number}", namespace=b"scale")


def cpu_of(process: psutil.Process, work: Callable[[], object]) -> float:
    """CPU seconds of another process while something is done."""
    before = process.cpu_times()
    work()
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


if __name__ == "__main__":
    sys.exit(main())
