"""Costs of a run of the tests: its slowest files, processor time, and starts of the real stack as they happen."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
import pytest

_LOOK_S = 2.0
_SLOWEST = 10
_YOUNG_S = 60.0
_WAITS = "ray::"
_SERVERS = {"flows.server.process", "flows.server.sqlite:site_app"}


@dataclass
class Starts:
    """Processes of the real stack that this machine has started since `begin`, as a thread sees them in /proc.

    A process counts once, by its id and time of creation. Actors of Ray are told apart by the environment that they are
    given. A process that lives for less than two seconds may be missed. Only a Python process becomes of a kind later,
    while it is young, or as a worker that Ray keeps for later.
    """

    kinds: dict[tuple[int, float], str] = field(default_factory=dict)
    nodes: dict[tuple[int, float], set[str]] = field(default_factory=dict)
    """Kinds of the actors below each local Ray."""

    def begin(self) -> None:
        """Begin to look."""
        self._over = threading.Event()
        self._known = set(psutil.pids())
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()

    def complete(self) -> int:
        """Rays that had an engine and a trainer rank."""
        return sum(kinds >= {"engine", "rank"} for kinds in self.nodes.values())

    def partial(self) -> int:
        """Rays that had only engines or only trainer ranks."""
        return sum(len(kinds & {"engine", "rank"}) == 1 for kinds in self.nodes.values())

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            now = set(psutil.pids())
            self._known = {one for one in now if one in self._known or self._is_known(one)}

    def _is_known(self, pid: int) -> bool:
        """Look at a process; true if it need not be looked at again."""
        try:
            process = psutil.Process(pid)
            kind, identity = _kind(process), _identity(process)
            if kind in ("engine", "rank") and (node := process.parent()) is not None:
                self.nodes.setdefault(_identity(node), set()).add(kind)
            if kind:
                self.kinds[identity] = kind
            name, age = process.name(), time.time() - process.create_time()
            return bool(kind) or not (name.startswith(_WAITS) or (name.startswith("python") and age < _YOUNG_S))
        except (psutil.Error, OSError):
            return False


def _identity(process: psutil.Process) -> tuple[int, float]:
    return process.pid, process.create_time()


def _kind(process: psutil.Process) -> str:
    """The kind of a process; empty while it is none, or not yet known."""
    name = process.name()
    if name == "raylet":
        return "Ray"
    if name.startswith("ray::Host"):
        given = process.environ()
        return "engine" if "VLLM_WORKER_MULTIPROC_METHOD" in given else "rank" if "GLOO_SOCKET_IFNAME" in given else ""
    if name.startswith("python") and _SERVERS & set(process.cmdline()):
        return "Prefect server"
    return ""


class Measures:
    """The plugin. Only the process that reports has one."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._starts = Starts()

    def pytest_sessionstart(self) -> None:
        self._clock, self._processor = time.monotonic(), _processor_seconds()

    @pytest.hookimpl(tryfirst=True)  # before xdist says that there is nothing to collect
    def pytest_collection(self) -> None:
        self._starts.begin()  # a thread: the processes of xdist are forked by now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._starts.end()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say, counts = terminalreporter.write_line, Counter(self._starts.kinds.values())
        terminalreporter.section("costs")
        for file, seconds in self._seconds.most_common(_SLOWEST):
            say(f"{seconds:7.1f} s  {file}")
        minutes, processor = (time.monotonic() - self._clock) / 60, _processor_seconds() - self._processor
        say(
            f"{minutes:.1f} minutes; {processor:.0f} s of processor on this machine, with all that ran beside the tests"
        )
        say(
            f"starts of the real stack: {self._starts.complete()} complete (a Ray with an engine and a trainer rank), "
            f"{self._starts.partial()} of one of the two alone; {counts['Ray']} Rays, {counts['engine']} engines, "
            f"{counts['rank']} ranks, {counts['Prefect server']} Prefect servers"
        )


def _processor_seconds() -> float:
    """Processor seconds of all processes since the machine was started."""
    spent = psutil.cpu_times()
    return spent.user + spent.nice + spent.system
