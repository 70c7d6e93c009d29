"""The local Ray as the operating system sees it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
import ray._private.services as ray_services

from storage.errors import InputError, RatchetError, WorkerLost
from tasks.config.environment import Settings
from tasks.workers.actors import WorkerGroup, fresh_names, spawn
from tasks.workers.cluster import Cluster
from tests.forked_python import start_forked, tree

LOCAL = Settings(ray_address=None, gpus=())


def everything(processes):
    """The processes, with those that are forked."""
    return list({one for process in processes for one in tree(process)})


def listening_addresses(processes):
    pids = {os.getpid(), *(process.pid for process in everything(processes))}
    sockets = psutil.net_connections("inet")
    return {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.pid in pids and each.status == "LISTEN"}


def gone(processes):
    """True if they have ended; one that is forked ends a moment after the one that stands for it."""
    return not psutil.wait_procs(processes, timeout=20)[1]


class Slow(dict):
    def sleep(self):
        time.sleep(300)


def start_actor():
    group = WorkerGroup(["actor"], spawn(fresh_names("test", 1), [{"RATCHET_TEST": "given"}], detached=False))
    group.start(Slow, [((("key", 1),),)], 60)
    assert group.submit("copy").wait(60) == [{"key": 1}]
    return group


def kill(cluster, name):
    victim = cluster._vital[name]
    victim.kill()
    victim.wait(10)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The Ray of the last tests, beside which there is no other."""
    with pytest.MonkeyPatch.context() as patch, Cluster(LOCAL) as cluster:
        start_forked(patch, tmp_path_factory)
        cluster.start()
        yield cluster


@contextmanager
def handler_of_sigterm(handler):
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("mine", [True, False])
def test_everything_listens_on_loopback_alone_a_handler_of_sigterm_is_kept_and_nothing_is_left_running(mine):
    """Without a handler of ours, that of Ray lets the process clean up."""

    def told(number, frame):
        raise InterruptedError

    with handler_of_sigterm(told if mine else signal.SIG_DFL), Cluster(LOCAL) as cluster:
        cluster.start()
        start_actor()
        processes = cluster.processes()
        assert sum(process.is_running() for process in processes) > 4  # others were there for a moment
        forked = everything(processes)
        assert listening_addresses(processes) == {"127.0.0.1"}
        with pytest.raises(InterruptedError if mine else SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    assert not psutil.wait_procs(processes, timeout=0)[1]
    assert gone(forked)
    assert not ray.is_initialized()


ELSEWHERE = """
import multiprocessing, os
from tests.tasks.workers.test_cluster import LOCAL, Cluster, listening_addresses, start_actor

forks = multiprocessing.get_context("forkserver")

def fork():
    child = forks.Process(target=os.getpid)
    child.start()
    child.join(60)
    assert child.exitcode == 0

fork()
with Cluster(LOCAL) as cluster:
    cluster.start()
    cluster.check_alive()
    assert listening_addresses(cluster.processes()) == {"127.0.0.1"}
    start_actor()
fork()
"""


@pytest.mark.slow
def test_wherever_the_process_was_started_actors_import_the_project_and_an_earlier_ray_and_fork_server_are_left_alone(
    tmp_path,
):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)  # it imports Ray, which adds to `sys.path`
    code = "import runpy; runpy.run_path('elsewhere.py')"
    # `ray start` leaves its address behind even when it has ended; Ray would attach to it
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: paths of sockets may have 107 characters
        Path(folder, "ray").mkdir()
        Path(folder, "ray", "ray_current_cluster").write_text("127.0.0.1:1")
        environment = {**os.environ, "RAY_TMPDIR": folder, "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class Looking(Cluster):
    """A Ray of one process, which is this one."""

    looks = 0

    def processes(self):
        self.looks += 1
        return [psutil.Process()]


def test_stages_that_follow_each_other_do_not_look_at_all_processes_each(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    cluster = Looking(LOCAL)
    cluster._started, cluster._vital = True, {"raylet": psutil.Process()}
    for _ in range(3):
        cluster.check_alive()
    assert cluster.looks == 1


class Begun(Cluster):
    """Notes the thread that starts Ray, with which the kernel ends it."""

    def _start_local(self):
        self.by = threading.current_thread()


def test_a_ray_does_not_end_with_the_thread_of_the_rollout_that_started_it():
    cluster = Begun(LOCAL)
    rollout = threading.Thread(target=cluster.start)
    rollout.start()
    rollout.join(20)
    assert cluster.by.is_alive()


@pytest.mark.parametrize("kind", [Exception, RuntimeError, OSError])
def test_a_ray_that_does_not_start_is_a_lost_worker_so_that_the_stage_is_tried_again(monkeypatch, kind):
    def late(**_):
        raise kind("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", late)
    with Cluster(LOCAL) as cluster, pytest.raises(WorkerLost, match=r"Ray did not start .* timed out during startup"):
        cluster.start()


def test_a_ray_that_cannot_be_kept_on_loopback_is_refused(monkeypatch):
    monkeypatch.delattr(ray_services, "resolve_ip_for_localhost")
    with Cluster(LOCAL) as cluster, pytest.raises(RatchetError, match="loopback"):
        cluster.start()


def attach(address, token, deadline_s=60.0):
    code = (
        f"from tasks.workers import cluster\ncluster._ATTACH_DEADLINE_S = {deadline_s}\n"
        "from tasks.workers.cluster import Cluster\nfrom tasks.config.environment import Settings\n"
        "from storage.errors import RatchetError\n"
        "with Cluster(Settings.from_environment()) as cluster:\n"
        "    try:\n        cluster.start()\n        cluster.check_alive()\n        assert not cluster.local\n"
        "        raise SystemExit('attached')\n"
        "    except RatchetError as error:\n        raise SystemExit(f'{type(error).__name__}: {error}')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment |= {"RAY_ADDRESS": address, "RAY_AUTH_TOKEN": token}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_address_that_accepts_and_never_answers_is_refused_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        answer = attach(address, "0" * 64, deadline_s=3.0)
    assert answer.startswith(f"{InputError.__name__}: the Ray cluster at {address} did not answer within 3 s: check")


@pytest.mark.parametrize("host", ["127.0.0.1:", pytest.param("", marks=pytest.mark.slow)])
def test_an_address_where_nothing_listens_is_refused(host):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        answer = attach(f"{host}{unused.getsockname()[1]}", "0" * 64)
    assert answer.startswith(f"{InputError.__name__}: there is no Ray cluster at")
    assert "RAY_ADDRESS" in answer


@pytest.mark.slow
def test_a_process_attaches_with_the_token_and_a_second_ray_in_one_process_is_refused(started):
    address = ray.get_runtime_context().gcs_address
    assert attach(address, os.environ["RAY_AUTH_TOKEN"]) == "attached"
    started.check_alive()
    with Cluster(LOCAL) as second, pytest.raises(RatchetError, match="another Ray"):
        second.start()
    assert attach(address, "0" * 64).startswith(f"{InputError.__name__}: ")
    started.check_alive()
    start_actor()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_dead_ray_is_told_once_and_then_started_anew_also_while_another_thread_waits(started, victim):
    started.check_alive()
    before = started.processes()
    forked = everything(before)
    group, told = start_actor(), []

    def train():
        try:
            group.submit("sleep").wait(300)
        except WorkerLost as loss:
            told.append(loss)

    training = threading.Thread(target=train)
    training.start()
    kill(started, victim)
    with pytest.raises(WorkerLost, match=victim):
        started.check_alive()
    assert not psutil.wait_procs(before, timeout=0)[1]
    assert gone(forked)
    started.check_alive()  # nothing is started, so nothing is reported
    training.join(20)
    assert len(told) == 1
    assert not group.alive()
    group.end()
    rollout = threading.Thread(target=started.start)
    rollout.start()
    rollout.join()
    start_actor()
    started.check_alive()
