"""The processes of a small run: a node, and under it two trainer ranks and an engine that compute next to nothing.

They end as Ray's do: a node takes its workers along, and ends with the process that drives the run.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from storage.digest import bytes_digest
from storage.errors import WorkerLost

NODE, RANKS, ENGINE = "node", ("trainer-0", "trainer-1"), "engine-0"
WORKERS = (*RANKS, ENGINE)
SIZE = 8192  # float32 in each array of a rank: 32 KiB a file
ARRAYS = ("weights", "first", "second")
_PR_SET_PDEATHSIG = 1


class Rank:
    """A trainer rank: weights and moments that each lesson changes, and the name of the state it holds."""

    def __init__(self, name: str) -> None:
        self.rank, self.step, self.held = RANKS.index(name), 0, None
        self.arrays = {array: np.zeros(SIZE, np.float32) for array in ARRAYS}

    def identity(self):
        return self.held

    def adopt(self, identity: str) -> None:
        self.held = identity

    def import_model(self, model: bytes) -> None:
        self.held, self.step = None, 0
        self.arrays = {array: np.zeros(SIZE, np.float32) for array in ARRAYS}
        self.arrays["weights"] = self._noise(bytes_digest(model))

    def train(self, lesson: str) -> None:
        """One step; everything it starts from matters to the result."""
        self.held, gradient = None, self._noise(lesson)
        self.arrays["first"] = 0.9 * self.arrays["first"] + gradient
        self.arrays["second"] = 0.9 * self.arrays["second"] + gradient**2
        self.arrays["weights"] = self.arrays["weights"] - 0.1 * self.arrays["first"]
        self.step += 1

    def save(self, folder: str) -> list[str]:
        """Write the state down; returns the names of the files."""
        names = {array: f"rank-{self.rank}-{array}.bin" for array in ARRAYS}
        for array, name in names.items():
            (Path(folder) / name).write_bytes(self.arrays[array].tobytes())
        if self.rank:
            # a file that has two names is stored by a copy, all others by a hard link: both are killed
            os.link(Path(folder) / names["weights"], Path(folder) / "held")
            return list(names.values())
        (Path(folder) / "trainer.json").write_text(f'{{"step": {self.step}}}\n')
        return [*names.values(), "trainer.json"]

    def load(self, folder: str) -> None:
        self.held, self.step = None, int((Path(folder) / "trainer.json").read_text().rstrip("}\n").split()[-1])
        for array in ARRAYS:
            data = (Path(folder) / f"rank-{self.rank}-{array}.bin").read_bytes()
            self.arrays[array] = np.frombuffer(data, np.float32)

    def export(self) -> bytes:
        return self.arrays["weights"].tobytes()

    def _noise(self, digest: str):
        return np.random.default_rng([int(digest, 16), self.rank, self.step]).standard_normal(SIZE, np.float32)


class Engine:
    """An engine: what it samples depends on the weights it holds and on the seed, and on nothing else."""

    def __init__(self, name: str) -> None:
        self.version, self.digest = -1, ""

    def identity(self) -> tuple[int, str]:
        return self.version, self.digest

    def receive(self, weights: bytes, version: int) -> str:
        self.version, self.digest = version, bytes_digest(weights)
        return self.digest

    def generate(self, seeds: list[int]) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of one response a seed."""
        return [self._response(np.random.default_rng([int(self.digest, 16), seed])) for seed in seeds]

    def _response(self, random: np.random.Generator) -> tuple[list[int], list[float]]:
        length = random.integers(1, 9)
        return random.integers(0, 1000, length).tolist(), (-random.random(length, np.float32)).tolist()


class Worker:
    """A worker as the flow process sees it."""

    def __init__(self, name: str, process: int, connection: Connection) -> None:
        self.name, self.process, self._connection = name, process, connection

    def begin(self, method: str, *arguments: Any) -> None:
        """Ask for a call; `result` waits for it. Both raise WorkerLost."""
        self._lost_unless(method, lambda: self._connection.send((method, arguments)))

    def result(self, method: str) -> Any:
        return self._lost_unless(method, self._connection.recv)

    def alive(self) -> bool:
        """Asked while it has nothing to do: all that can be read then is the end."""
        return not self._connection.poll()

    def end(self) -> None:
        if self.alive():
            os.kill(self.process, signal.SIGKILL)

    def _lost_unless(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError):
            raise WorkerLost(f"{self.name} died during {method}; the next attempt starts a new one") from None


class Group:
    """Workers to whom every call goes, and who are ended as soon as one of them is dead."""

    def __init__(self, members: list[Worker]) -> None:
        self.members = members

    def call(self, method: str, *arguments: Any) -> list[Any]:
        try:
            for member in self.members:
                member.begin(method, *arguments)
            return [member.result(method) for member in self.members]
        except WorkerLost:
            self.end()
            raise

    def alive(self) -> bool:
        return all(member.alive() for member in self.members)

    def end(self) -> None:
        for member in self.members:
            member.end()


class Fleet:
    """The node and its workers. Make it before any thread is started: it forks.

    Args:
        replaces: see before each stage who died meanwhile, and start new ones, as `tasks.workers.fleet.Fleet` does once
            Ray has told it; otherwise a death is met in the next call.
        started: is told name and process id of each process.
    """

    def __init__(self, replaces: bool, started: Callable[[str, int], None]) -> None:
        self._replaces, self._started = replaces, started
        self._control, theirs = socket.socketpair()
        self._node = _fork(lambda: _node(self._control, theirs))
        theirs.close()
        started(NODE, self._node)
        self._trainers, self._engine = self._group(RANKS), self._group((ENGINE,))

    def trainers(self) -> Group:
        self._check_node()
        if self._replaces and not self._trainers.alive():
            self._trainers.end()
            self._trainers = self._group(RANKS)
        return self._trainers

    def engine(self) -> Group:
        self._check_node()
        if self._replaces and not self._engine.alive():
            self._engine = self._group((ENGINE,))
        return self._engine

    def processes(self) -> Mapping[str, int]:
        """Process ids by name."""
        workers = {member.name: member.process for member in (*self._trainers.members, *self._engine.members)}
        return {NODE: self._node, **workers}

    def _check_node(self) -> None:
        if self._replaces and Connection(os.dup(self._control.fileno())).poll():
            raise WorkerLost("the node died since it was started; the next attempt starts a new one")

    def _group(self, names: tuple[str, ...]) -> Group:
        return Group([self._start(name) for name in names])

    def _start(self, name: str) -> Worker:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [name.encode()], [theirs.fileno()])
        theirs.close()
        process = int(self._control.recv(100))
        self._started(name, process)
        return Worker(name, process, Connection(ours.detach()))


def _node(flow: socket.socket, control: socket.socket) -> None:
    """Start a worker for each name that comes with a connection."""
    flow.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets a worker that ended
    while True:
        name, connections, _, _ = socket.recv_fds(control, 100, 1)
        if not name:
            return
        process = _fork(lambda name=name, own=connections[0]: _work(control, name.decode(), own))
        os.close(connections[0])
        control.send(str(process).encode())


def _work(control: socket.socket, name: str, own: int) -> None:
    control.close()
    worker, connection = Engine(name) if name == ENGINE else Rank(name), Connection(own)
    calls = {method: value for method, value in type(worker).__dict__.items() if not method.startswith("_")}
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:  # nobody will ask any more
            return
        connection.send(calls[method](worker, *arguments))


def _fork(work: Callable[[], None]) -> int:
    """Start a process that ends with this one, however that ends."""
    parent, process = os.getpid(), os.fork()
    if process:
        return process
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        os._exit(1)
