"""Two of Ray's nodes on this machine: room for roles, refusals, folders, and the store in which ranks meet."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import ray

from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError, StorageUnavailable, WorkerLost
from storage.manifest import Manifest
from storage.parts import PartWriter
from tasks.config.environment import Settings, trainer_environment
from tasks.workers import meeting
from tasks.workers.actors import living
from tasks.workers.cluster import LOOPBACK
from tasks.workers.hosts import HostFolders, give_up, on_each, reserve, reserve_all, this_node
from tasks.workers.kept_by_ray import RayStore
from tasks.workers.ranks import start_trainers
from tasks.workers.silence import Where, spent_by
from tasks.workers.standby import Place, Standby
from tests.ray_nodes import ray_nodes, unlike_node
from tests.tasks.workers.test_standby import idle
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer_core.protocol import SavedFiles
from trainer_core.start import import_trainer

pytestmark = pytest.mark.slow
NOW = datetime.now(UTC)
PAIR = [{"CPU": 1.0}] * 2
CLUSTER = Settings(ray_address="127.0.0.1:6379", gpus=())
CONFIG = TrainerConfig(
    parallel=ParallelConfig(data=2), optimizer=OptimizerConfig(learning_rate=1e-3), max_length=8, micro_batch_size=1
)

ON_NODES = """
import sys
from pathlib import Path
import psutil, ray
from tasks.config.environment import Settings
from tasks.config.run import RunConfig
from tasks.workers.actors import find_groups
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tests.tasks.workers.test_standby import kill

def came_up():
    for engine in fleet.engines(folder):
        engine.identity()
        engine.awaited = True
    return fleet.engines(folder)

def node(process):
    return psutil.Process(process).ppid()  # Ray's server of it

folder = Path(sys.argv[2])
with Fleet("run", RunConfig.model_validate_json(sys.argv[1]), Cluster(Settings.from_environment())) as fleet:
    before = came_up()
    stays, dies = [engine.processes()[0] for engine in before]
    waiting = [ray.get(actor.where.remote()).process for (actor,) in find_groups("run/standby-engine").values()]
    (beside,) = [process for process in waiting if node(process) == node(dies)]
    assert len(waiting) == 2 and node(stays) != node(dies)
    kill(dies, before[1].alive)
    assert [engine.processes()[0] for engine in came_up()] == [stays, beside]
"""


@pytest.fixture(scope="module")
def nodes():
    """Ray's names of two nodes with two processors each; this process is on a third one, without any."""
    with ray_nodes(2, 2) as (_, made):
        yield made


def manifest_of(parts):
    return Manifest(
        run="run", iteration=0, stage="train", parts=parts, config_digest="", code_version="", started=NOW, finished=NOW
    )


def test_a_role_is_packed_or_spread_and_two_runs_never_share_what_ray_keeps(nodes):
    assert len(set(reserve("one", "trainers", PAIR).nodes)) == 1
    spread = reserve("one", "engines", PAIR)
    assert set(spread.nodes) <= set(nodes)
    assert reserve("one", "engines", PAIR).group.id == spread.group.id  # a later process of the run
    with pytest.raises(InputError, match=r"trainers of run two: 2 CPU are needed, 1 CPU together .* 0 of 4 CPU free"):
        reserve("two", "trainers", PAIR)
    give_up("one")
    assert set(reserve("two", "engines", [{"CPU": 2.0}] * 2).nodes) == set(nodes)
    give_up("two")


def test_a_run_that_is_refused_keeps_nothing(nodes):
    with pytest.raises(InputError, match=r"engines of run large: 9 CPU are needed, .* 2 of 4 CPU free"):
        reserve_all("large", {"trainers": PAIR, "engines": [{"CPU": 1.0}] * 9})
    assert set(reserve_all("one", {"trainers": PAIR, "engines": PAIR})) == {"trainers", "engines"}
    give_up("one")


def test_what_must_be_on_one_host_and_is_not_there_is_refused_also_after_a_loss(nodes, monkeypatch):
    monkeypatch.setattr("tasks.workers.hosts._AGAIN_S", 2)
    with pytest.raises(WorkerLost, match=r"3 CPU are needed, 3 CPU together on one host, .* 4 of 4 CPU free on 3"):
        reserve("run", "trainers", [{"CPU": 3.0}], ["lost"])


def test_a_host_that_joins_after_a_loss_and_cannot_be_used_is_named_once_and_passed_over(
    nodes, tmp_path, monkeypatch, caplog
):
    both = [{"CPU": 2.0}] * 2
    reserve("other", "engines", both)
    told = r"has Python 3\.9\.0, and this one"
    with unlike_node(ray.get_runtime_context().gcs_address, 2, tmp_path) as unlike, caplog.at_level("WARNING"):
        monkeypatch.setattr("tasks.workers.hosts._AGAIN_S", 5)
        for _ in range(2):  # attempts
            with pytest.raises(WorkerLost, match=f"no room .* Passed over: host {LOOPBACK} {told}"):
                reserve("run", "trainers", both[:1], ["lost"])
        with pytest.raises(InputError, match=told):  # no host was lost
            reserve("run", "trainers", both[:1])
        monkeypatch.setattr("tasks.workers.hosts._AGAIN_S", 90)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(reserve, "run", "trainers", both, ["lost"])
            time.sleep(2)  # the host that cannot be used is the only one with room
            give_up("other")
            assert set(waits.result().nodes) == set(nodes) - {unlike}
    assert len(caplog.messages) == 1
    give_up("run")


def test_each_host_fetches_and_stores_its_own_files(nodes, tmp_path):
    root = open_root(str(tmp_path / "root"))
    writer = PartWriter(root, "run", 0, "train")
    (tmp_path / "saved").mkdir()
    names = [f"{rank}.bin" for rank in range(3)]
    for name in names:
        (tmp_path / "saved" / name).write_bytes(name.encode() * 9)
    folders = HostFolders()
    folders.moved(nodes, (nodes[0], nodes[1], this_node()))
    saved = SavedFiles(tuple(names), None, tuple((name,) for name in names))
    parts = folders.storing(writer, tmp_path / "saved", saved, layout.STATE)()
    assert [part.name for part in parts] == [f"state/{name}" for name in names]
    manifest = manifest_of(parts)
    with pytest.raises(InputError, match=rf"host {LOOPBACK}: run run cannot be seen at the storage root"):
        folders.fetch(root, manifest, tmp_path / "loaded", layout.STATE)
    root.put_if_absent(layout.run_config_key("run"), b"{}")
    folders.fetch(root, manifest, tmp_path / "loaded", layout.STATE)
    assert sorted(path.name for path in (tmp_path / "loaded").iterdir()) == names
    folders.remove(tmp_path / "loaded")
    assert not (tmp_path / "loaded").exists()
    assert len(set(on_each(nodes, os.getpid))) == 2


def test_a_full_disk_of_a_host_is_named_with_the_host_and_is_not_tried_again(nodes):
    full = Path("/dev/full")  # every write to it fails as on a disk without room
    with pytest.raises(StorageUnavailable, match=rf"host {LOOPBACK}: .*No space left .*: free space on that host"):
        on_each(nodes[:1], full.write_text, "x")


def test_processor_time_is_asked_of_the_hosts_and_a_host_whose_ray_is_frozen_has_a_reason(nodes, monkeypatch):
    places = [Where(node, "host", process) for node, process in zip(nodes, on_each(nodes, os.getpid), strict=True)]
    assert min(spent_by(set(places)).values()) > 0
    (raylet,) = on_each(nodes[1:], os.getppid)
    monkeypatch.setattr("tasks.workers.silence._ANSWER_S", 3.0)
    os.kill(raylet, signal.SIGSTOP)
    try:
        found = spent_by(set(places))
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert found[places[0]] > 0
    assert f"host {LOOPBACK} does not answer" in str(found[places[1]])


class Rank:
    """One rank, which knows where it is."""

    def where(self):
        return ray.get_runtime_context().get_node_id(), os.getpid()


def test_a_rank_lives_on_and_one_that_waits_on_the_host_of_another_takes_its_place(nodes):
    def start(_model_dir, _config, _rank):
        return Rank()

    def ranks(there):
        given = (wait_s := 120.0, False, start, [place.seat for place in places], there)
        group = start_trainers("run/trainers", "", CONFIG, "cpu", CLUSTER, *given)
        return group, group.submit("where").wait(wait_s)

    seats, standby = reserve("run", "trainers", [{"CPU": 2.0}] * 2), Standby("run")
    importing = ("rank", import_trainer, ("cpu",), tuple(trainer_environment("cpu", (), local=False).items()))
    places = [Place(*importing, node, seats.options(at, {"CPU": 2.0})) for at, node in enumerate(seats.nodes)]
    first, before = ranks({})
    assert [node for node, _ in before] == list(seats.nodes)
    standby.fill([places[1]])
    os.kill(before[1][1], signal.SIGKILL)
    while first.alive():  # Ray learns of it from the operating system
        time.sleep(0.1)
    there = living(first.survivors())
    assert there.keys() == {0}
    assert standby.take({0: places[0]}) == {}
    there |= standby.take({1: places[1]})
    waited = ray.get(there[1].where.remote()).process
    second, after = ranks(there)
    assert after == [before[0], (seats.nodes[1], waited)]
    second.end()
    give_up("run")


def test_a_process_waits_on_the_host_of_each_engine_and_takes_its_place(nodes, tmp_path):
    config = idle(tmp_path, "workers.standby=2", "engine.count=2", "train.parallel.pipeline=1", "device.kind=cpu")
    command = [sys.executable, "-c", ON_NODES, config.model_dump_json(), str(tmp_path)]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [name for name in ray.util.list_named_actors() if name.startswith("run/")]


def test_ranks_meet_in_what_ray_keeps_until_their_group_ends(nodes):
    first, second = (RayStore("run/trainers/1", "ratchet-meeting", timedelta(seconds=5)) for _ in range(2))
    with ThreadPoolExecutor(4) as threads:
        totals = list(threads.map(lambda store: store.add("n", 2), (first, second) * 4))
    assert sorted(totals) == list(range(2, 18, 2))
    assert first.add("n", 0) == 16
    assert second.get("n") == b"16"
    assert first.compare_set("key", "", "1") == second.compare_set("key", "", "2") == b"1"
    assert second.compare_set("key", "1", "3") == b"3"
    assert first.check(["key", "n"])
    assert not first.check(["key", "other"])
    with pytest.raises(RuntimeError, match="run/trainers/1 did not come"):
        first.wait(["other"], timedelta(seconds=0.1))
    assert meeting.left("run")
    assert meeting.forget("run")
    assert not meeting.left("run")
