"""Several hosts on this machine: each has a network, /tmp, /dev/shm and home of its own, and can write nothing else.

A host is a pair of namespaces (network and mounts) that a sleeping process keeps. Hosts are joined by a bridge in a
namespace of its own, which nothing outside reaches; so does nothing inside reach out.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

PROJECT = Path(__file__).resolve().parent.parent
_NETWORK = "10.77.0"
_OWN_USER = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
_READY = "echo ready; exec sleep infinity"
_BRIDGE = "ip link add bridge type bridge && ip link set bridge up && "
_MOUNTS = (
    "mount -t tmpfs tmpfs /tmp && mount -t tmpfs -o size=1g tmpfs /dev/shm && mkdir -m 700 /tmp/home && "
    "mount -o remount,bind,ro / && ip link set lo up && "
)


def permitted() -> bool:
    """True if this user may make namespaces, and has the programs for it."""
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "mount")):
        return False
    words = ["unshare", *_OWN_USER, "--net", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return subprocess.run(words, capture_output=True).returncode == 0


class Host:
    """One host, and the processes that a test starts on it."""

    def __init__(self, address: str, keeper: subprocess.Popen[str], enter: list[str]) -> None:
        self.address, self._keeper, self._enter = address, keeper, enter

    def start(self, *command: str, log: IO[str] | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start a command here, in a session of its own; what it says goes to `log`, or nowhere."""
        environment = {**os.environ, "HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": str(PROJECT), **variables}
        return subprocess.Popen(
            [*self._enter, *command], cwd=PROJECT, env=environment, text=True, start_new_session=True,
            stdout=log or subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command: str, timeout_s: float = 120, **variables: str) -> str:
        """Output of a command that must succeed."""
        with tempfile.TemporaryFile("w+") as log:
            code = self.start(*command, log=log, **variables).wait(timeout_s)
            log.seek(0)
            out = log.read()
        assert code == 0, out
        return out

    def processes(self) -> list[psutil.Process]:
        """Everything that runs here, but the process that keeps the host."""
        own, found = _network(self._keeper.pid), psutil.process_iter(["name", "cmdline"])
        return [one for one in found if one.pid != self._keeper.pid and _network(one.pid) == own]

    def named(self, *names: str) -> list[psutil.Process]:
        """Processes here whose names or titles begin with one of these."""
        found = [(one, (one.info["name"], " ".join(one.info["cmdline"] or ()))) for one in self.processes()]
        return [one for one, words in found if any(word.startswith(names) for word in words)]

    def listening(self, name: str) -> dict[str, set[int]]:
        """Process ids of those that accept connections, by address, as the socket table has them."""
        ours, found = {process.pid for process in self.named(name)}, dict[str, set[int]]()
        for row in self.run("ss", "-ltnpH").splitlines():
            if pids := ours & set(map(int, re.findall(r"pid=(\d+)", row))):
                found.setdefault(row.split()[3].rpartition(":")[0], set()).update(pids)
        return found

    def kill(self) -> None:
        """End everything that runs here at once, as a power cut does."""
        for process in self.processes():
            process.send_signal(signal.SIGKILL)

    def cut(self, down: bool = True) -> None:
        """Take the cable out, or put it back."""
        self.run("ip", "link", "set", "eth", "down" if down else "up")

    def end(self) -> None:
        """End the host with everything on it."""
        self.kill()
        self._keeper.kill()
        self._keeper.wait(10)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """That many hosts, with the addresses 10.77.0.1 and on."""
    switch, enter = _kept(["unshare", *_OWN_USER, "--net", "--mount"], _BRIDGE)
    made: list[Host] = []
    try:
        for number in range(1, count + 1):
            made.append(_joined(number, enter))
        yield made
    finally:
        for host in made:
            host.end()
        switch.kill()
        switch.wait(10)


def _joined(number: int, switch: list[str]) -> Host:
    keeper, enter = _kept([*switch, "unshare", "--net", "--mount"], _MOUNTS)
    pid, address = keeper.pid, f"{_NETWORK}.{number}"  # unshare and nsenter replace themselves
    _done([*switch, "ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth", "netns", str(pid)])
    _done([*switch, "ip", "link", "set", f"port{number}", "master", "bridge", "up"])
    _done([*enter, "ip", "address", "add", f"{address}/24", "dev", "eth"])
    _done([*enter, "ip", "link", "set", "eth", "up"])
    return Host(address, keeper, enter)


def _kept(unshare: list[str], prepare: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A process that keeps new namespaces, and the words that enter them."""
    keeper = subprocess.Popen([*unshare, "sh", "-c", prepare + _READY], text=True, stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n", "namespaces are not permitted here: see `permitted`"
    user = ["--user", "--preserve-credentials"] if _OWN_USER else []
    return keeper, ["nsenter", "--target", str(keeper.pid), *user, "--net", "--mount", f"--wd={PROJECT}"]


def _done(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _network(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None
