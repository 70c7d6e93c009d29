"""The real loop over hosts that share an S3 server and nothing else; one of them dies, and another joins."""

import json
import re
import sys
import time
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
    """A head, on which flows and the S3 server run, and what other hosts need to know of it."""

    def __init__(self, head: Host) -> None:
        self.head = head
        store = {"AWS_ENDPOINT_URL": f"http://{head.address}:5000", "AWS_DEFAULT_REGION": "us-east-1"}
        self.known = {**RAY, **store, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        self._ray = ("ray", "start", "--disable-usage-stats", "--object-store-memory=80000000")
        head.start(sys.executable, "-m", "moto.server", "--host", head.address, "--port", "5000")
        own = ("--head", "--port=6379", f"--node-ip-address={head.address}", "--include-dashboard=false")
        head.run(*self._ray, *own, "--num-cpus=0", **self.known)
        head.run(sys.executable, "-c", "import s3fs; s3fs.S3FileSystem().mkdir('runs')", **self.known)

    def join(self, host: Host, cpus: int = 1) -> None:
        """Let a host join the cluster, with one processor, so that no two ranks fit."""
        words = (f"--address={self.head.address}:6379", f"--node-ip-address={host.address}", f"--num-cpus={cpus}")
        host.run(*self._ray, *words, **self.known)

    def begin(self, root: str, log: Path, *settings: str, run: str = RUN) -> Popen[str]:
        """Begin the tiny run, or go on with it."""
        given = [word for setting in (*LAYOUT, *settings) for word in ("--set", setting)]
        words = ("run", str(TINY), "--root", root, "--run", run, *given)
        address = f"{self.head.address}:6379"
        with log.open("a") as said:
            return self.head.start(sys.executable, "-m", "flows", *words, log=said, RAY_ADDRESS=address, **self.known)


def until(what: str, log: Path, flow: Popen[str]) -> None:
    """Wait until the flow has said something."""
    while what not in log.read_text():
        assert flow.poll() is None, log.read_text()
        time.sleep(0.2)


def listeners(host: Host, of: str) -> set[str]:
    """Addresses at which processes of a host accept connections whose names begin so, as the socket table has them."""
    pids = {process.pid for process in host.processes() if " ".join(process.cmdline()).startswith(of)}
    rows = [row for row in host.run("ss", "-ltnpH").splitlines() if pids & set(map(int, re.findall(r"pid=(\d+)", row)))]
    return {row.split()[3].rpartition(":")[0] for row in rows}


def test_a_run_over_hosts_goes_on_to_the_same_bits_when_one_dies(tmp_path):
    log = tmp_path / "log"
    with hosts(6) as (head, *others, spare):
        site = Site(head)
        for host in others:
            site.join(host)
        assert "object_store_memory" in head.run("ray", "status", RAY_ADDRESS=f"{head.address}:6379", **site.known)
        began = time.monotonic()
        assert site.begin("s3://runs/refused", log, "engine.count=9", run="large").wait(200) == 2, log.read_text()
        assert re.search(r"engines of run large: 9 CPU are needed.* 4 CPU free on 5 hosts", log.read_text())
        assert time.monotonic() - began < 150

        whole = site.begin("s3://runs/whole", log)
        until("iteration 0/2", log, whole)
        found = {host.address: listeners(host, "ray::Host") for host in others}
        of_ranks = [address for address, listening in found.items() if listening == {address, "*"}]
        of_engines = [listening for listening in found.values() if listening == {"127.0.0.1", "*"}]
        assert len(of_ranks) == len(of_engines) == 2, found  # "*" is Ray's own server of each process, with its token
        assert whole.wait(400) == 0, log.read_text()

        (log := tmp_path / "killed").touch()
        killed = site.begin("s3://runs/killed", log)
        until("iteration 0/2", log, killed)
        next(host for host in others if host.address in listeners(host, "ray::Host")).kill()
        site.join(spare)
        if killed.wait(400):  # the state of the dead host was lost before it was stored
            assert site.begin("s3://runs/killed", log).wait(400) == 0, log.read_text()

        roots = ("s3://runs/whole", "s3://runs/killed")
        found = json.loads(head.run(sys.executable, "-c", COMPARED, *roots, RUN, **site.known))
        assert found["differences"] == []
        assert found["states"] == 3
