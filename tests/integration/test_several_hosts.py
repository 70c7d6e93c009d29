"""The real loop over hosts that share only an S3 server: one dies and another joins, one or all are cut off.

The tests share hosts, and the run that nothing disturbs; each leaves four hosts in the cluster.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from tests.integration.command import RUN, TINY
from tests.several_hosts import Host, hosts, permitted

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not permitted(), reason="this user may not make network and mount namespaces"),
]
LAYOUT = ("train.parallel.pipeline=2", "engine.count=2", "device.kind=cpu", "run.iterations=2")
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
COMPARED = """
import sys
from flows.proof.compare import Pair
from storage.backends.root import open_root
found = Pair(open_root(sys.argv[1]), open_root(sys.argv[2]), sys.argv[3]).compare(2, 1)
print(found.model_dump_json())
"""


class Site:
    """A head, on which flows and the S3 server run, hosts beside it, and what those need to know of it."""

    def __init__(self, head: Host, spare: list[Host]) -> None:
        self.head, self.spare = head, spare
        self.joined: list[Host] = []
        store = {"AWS_ENDPOINT_URL": f"http://{head.address}:5000", "AWS_DEFAULT_REGION": "us-east-1"}
        self.known = {**RAY, **store, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        self._ray = ("ray", "start", "--disable-usage-stats", "--object-store-memory=80000000")
        head.start(sys.executable, "-m", "moto.server", "--host", head.address, "--port", "5000")
        own = ("--head", "--port=6379", f"--node-ip-address={head.address}", "--include-dashboard=false")
        head.run(*self._ray, *own, "--num-cpus=0", **self.known)
        head.run(sys.executable, "-c", "import s3fs; s3fs.S3FileSystem().mkdir('runs')", **self.known)

    def join(self) -> None:
        """Let a spare host join the cluster, with one processor, so that no two ranks fit."""
        host = self.spare.pop(0)
        words = (f"--address={self.head.address}:6379", f"--node-ip-address={host.address}", "--num-cpus=1")
        while host.start(*self._ray, *words, **self.known).wait(120):  # a busy machine needs more than Ray's 30 s
            host.kill()
        self.joined.append(host)

    def lose(self) -> Host:
        """A host with a rank, which is from now on a spare one."""
        lost = next(host for host in self.joined if host.address in self.ranks())
        self.joined.remove(lost)
        self.spare.append(lost)
        return lost

    def begin(self, root: str, log: Path, *settings: str, run: str = RUN) -> Popen[str]:
        """Begin the tiny run, or go on with it."""
        given = [word for setting in (*LAYOUT, *settings) for word in ("--set", setting)]
        words = ("run", str(TINY), "--root", root, "--run", run, *given)
        address = f"{self.head.address}:6379"
        with log.open("a") as said:
            return self.head.start(sys.executable, "-m", "flows", *words, log=said, RAY_ADDRESS=address, **self.known)

    def trained(self, root: str, log: Path, *settings: str, iterations: int = 0) -> Popen[str]:
        """The tiny run, which has done so many iterations and its preparation."""
        flow = self.begin(root, log, *settings)
        until(f"iteration {iterations}/2", log, flow)
        return flow

    def ranks(self) -> dict[str, int]:
        """Process ids of the ranks by the addresses of their hosts, at which they listen."""
        found = {host.address: host.listening("ray::Host").get(host.address, set()) for host in self.joined}
        return {address: pid for address, pids in found.items() for pid in pids}

    def ends_like(self, whole: str, root: str, flow: Popen[str], log: Path) -> None:
        """The run ends, if need be once more begun, with the manifests and states of one that nothing disturbed."""
        if flow.wait(600):  # the state of the lost host was lost before it was stored
            assert self.begin(root, log).wait(600) == 0, log.read_text()
        found = json.loads(self.head.run(sys.executable, "-c", COMPARED, whole, root, RUN, **self.known))
        assert found["differences"] == []
        assert found["states"] == 3


def until(what: str, log: Path, flow: Popen[str]) -> None:
    """Wait until the flow has said something."""
    while what not in log.read_text():
        assert flow.poll() is None, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with hosts(6) as (head, *others):
        site = Site(head, others)
        for _ in range(4):
            site.join()
        yield site


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory):
    """The root of a run that nothing disturbs, and where its processes listened, host by host."""
    log, root = tmp_path_factory.mktemp("whole") / "log", "s3://runs/whole"
    flow = site.trained(root, log)
    found = {host.address: set(host.listening("ray::Host")) for host in site.joined}
    assert flow.wait(600) == 0, log.read_text()
    return root, found


def test_what_does_not_fit_is_refused(site, tmp_path):
    log, began, address = tmp_path / "log", time.monotonic(), f"{site.head.address}:6379"
    assert "object_store_memory" in site.head.run("ray", "status", RAY_ADDRESS=address, **site.known)
    assert site.begin("s3://runs/refused", log, "engine.count=9", run="large").wait(200) == 2, log.read_text()
    assert re.search(r"engines of run large: 9 CPU are needed.* 4 CPU free on 5 hosts", log.read_text())
    assert time.monotonic() - began < 150


def test_ranks_listen_at_the_given_address_alone_and_engines_at_none(whole):
    _, found = whole
    of_ranks = [address for address, listening in found.items() if listening == {address, "*"}]
    of_engines = [listening for listening in found.values() if listening == {"127.0.0.1", "*"}]
    assert len(of_ranks) == len(of_engines) == 2, found  # "*" is Ray's own server of each process, with its token


def test_a_run_over_hosts_goes_on_to_the_same_bits_when_one_dies(site, whole, tmp_path):
    log, root = tmp_path / "log", "s3://runs/killed"
    flow = site.trained(root, log)
    site.lose().kill()
    site.join()
    site.ends_like(whole[0], root, flow, log)


def test_a_process_that_waits_on_its_host_takes_the_place_of_a_rank_and_the_other_rank_lives_on(site, whole, tmp_path):
    log, root = tmp_path / "log", "s3://runs/standby"
    flow = site.trained(root, log, "workers.standby=2", iterations=1)
    before = site.ranks()
    dies, lives = before
    waiting = {process.pid for host in site.joined if host.address == dies for process in host.named("ray::Host")}
    os.kill(before[dies], signal.SIGKILL)
    while (now := site.ranks()).keys() != before.keys() or now[dies] == before[dies]:
        assert flow.poll() is None, log.read_text()
        time.sleep(0.5)
    assert now[lives] == before[lives]
    assert now[dies] in waiting
    assert flow.wait(600) == 0, log.read_text()
    site.ends_like(whole[0], root, flow, log)


def test_a_run_over_hosts_goes_on_to_the_same_bits_when_one_is_cut_off_for_a_minute(site, whole, tmp_path):
    log, root = tmp_path / "log", "s3://runs/cut"
    flow = site.trained(root, log)
    lost = site.lose()
    lost.cut()
    time.sleep(60)
    lost.cut(down=False)
    end = time.monotonic() + 120
    while (kept := lost.named("raylet", "ray::")) and time.monotonic() < end:
        time.sleep(1)  # once the cluster has given the host up, Ray ends there what it had
    if not kept:
        lost.kill()  # what looks after the host begins its part of Ray again
        site.spare.reverse()
        site.join()
    site.ends_like(whole[0], root, flow, log)


def test_a_run_over_hosts_goes_on_to_the_same_bits_when_all_are_cut_off_from_the_first_for_a_minute(
    site, whole, tmp_path
):
    log, root = tmp_path / "log", "s3://runs/alone"
    flow = site.trained(root, log)
    site.head.cut()
    time.sleep(60)
    site.head.cut(down=False)
    end = time.monotonic() + 120
    while any(host.named("raylet", "ray::") for host in site.joined) and time.monotonic() < end:
        time.sleep(1)
    for host in [one for one in site.joined if not one.named("raylet", "ray::")]:
        host.kill()  # what looks after a host begins its part of Ray again
        site.joined.remove(host)
        site.spare.append(host)
    while len(site.joined) < 4:
        site.join()
    site.ends_like(whole[0], root, flow, log)
