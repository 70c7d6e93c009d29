"""The processes of a small run: a node, and under it two trainer ranks and an engine, each a small worker.

They end as Ray's do: a node ends its workers with it, and ends with the process that drives the run.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from storage.errors import RatchetError, WorkerLost
from tasks.config.run import RunConfig
from tasks.workers.interface import EngineHandle, TrainerGroup
from tasks.workers.placement import Placement
from tests.small.here import PLACEMENT
from tests.small.kinds import engine_of, trainer_of
from trainer_core.config import TrainerConfig

NODE, RANKS, ENGINE = "node", ("trainer-0", "trainer-1"), "engine-0"
WORKERS = (*RANKS, ENGINE)
_PR_SET_PDEATHSIG = 1


class Worker:
    """A worker as the flow process sees it."""

    def __init__(self, name: str, process: int, connection: Connection) -> None:
        self.name, self.process, self._connection = name, process, connection

    def begin(self, method: str, *arguments: Any, **options: Any) -> None:
        """Request a call; `result` waits for it. Both raise WorkerLost."""
        self._lost_unless(method, lambda: self._connection.send((method, arguments, options)))

    def result(self, method: str) -> Any:
        succeeded, value = self._lost_unless(method, self._connection.recv)
        if not succeeded:
            raise value
        return value

    def alive(self) -> bool:
        """Called while the worker is idle, when only end-of-file can be read."""
        return not self._connection.poll()

    def end(self) -> None:
        if self.alive():
            os.kill(self.process, signal.SIGKILL)

    def _lost_unless(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError):
            raise WorkerLost(f"{self.name} died during {method}; the next attempt starts a new one") from None


class WorkerGroup:
    """Workers that all get every call; as soon as one is dead, the others are ended."""

    def __init__(self, members: list[Worker], called: Callable[[str, Sequence[Any]], None] = lambda *_: None) -> None:
        self.members, self._called = members, called

    def submit(self, method: str, *arguments: Any, **options: Any) -> "Submitted":
        self._called(method, arguments)
        with self._ended_by_a_loss():
            for member in self.members:
                member.begin(method, *arguments, **options)
        return Submitted(self, method)

    def results(self, method: str) -> list[Any]:
        with self._ended_by_a_loss():
            return [member.result(method) for member in self.members]

    def alive(self) -> bool:
        return all(member.alive() for member in self.members)

    def processes(self) -> list[int]:
        return [member.process for member in self.members]

    def end(self) -> None:
        for member in self.members:
            member.end()

    @contextmanager
    def _ended_by_a_loss(self) -> Iterator[None]:
        try:
            yield
        except WorkerLost:
            self.end()
            raise


class Submitted:
    """A call that was sent to every member."""

    def __init__(self, group: WorkerGroup, method: str) -> None:
        self._group, self._method = group, method

    def wait(self, deadline_s: float) -> list[Any]:
        return self._group.results(self._method)


class SmallFleet:
    """The node and its workers, as `tasks.workers.interface.Workers`. Create it before any thread is started: it forks.

    Args:
        replaces: check before each stage which workers died, and replace them, as `tasks.workers.fleet.Fleet` does once
            Ray has reported it; otherwise the next call meets the death.
        started: called with name and process id of each process.
        other_lesson: number of the policy training that gives a different result.
        called: called with the method and the arguments of each call of a group.
    """

    def __init__(
        self,
        config: RunConfig,
        replaces: bool,
        started: Callable[[str, int], None],
        other_lesson: int | None = None,
        called: Callable[[str, Sequence[Any]], None] = lambda *_: None,
    ) -> None:
        self._config, self._replaces, self._started = config, replaces, started
        self._other_lesson, self._called = other_lesson, called
        self._control, theirs = socket.socketpair()
        self._node = _fork(lambda: _node(self._control, theirs))
        theirs.close()
        started(NODE, self._node)
        self._names, self._starting = RANKS[: config.train.parallel.world_size], threading.Lock()
        self._ranks, self._engine = self._group(self._names), self._group((ENGINE,))
        self._made: set[WorkerGroup] = set()

    def expect(self) -> None:
        """Do nothing: everything is running from the start."""

    def warm(self, model_dir: Path, config: TrainerConfig) -> None:
        """As `expect`."""

    def trainers(self, model_dir: Path, config: TrainerConfig) -> TrainerGroup:
        self._check_node()
        if self._replaces and not self._ranks.alive():
            self._ranks.end()
            self._ranks = self._group(self._names)
        arguments = [(str(model_dir), config, rank, self._other_lesson) for rank in range(len(self._names))]
        return TrainerGroup(self._ready(self._ranks, trainer_of(config), arguments), self._config.workers)

    def engines(self, model_dir: Path) -> list[EngineHandle]:
        self._check_node()
        if self._replaces and not self._engine.alive():
            self._engine = self._group((ENGINE,))
        group = self._ready(self._engine, engine_of(self._config), [(str(model_dir),)])
        return [EngineHandle(group, self._config.workers)]

    def judge(self, model_dir: Path) -> EngineHandle:
        raise AssertionError("these workers judge nothing")

    def placement(self) -> Placement:
        return PLACEMENT

    def processes(self) -> dict[str, int]:
        workers = {member.name: member.process for member in (*self._ranks.members, *self._engine.members)}
        return {NODE: self._node, **workers}

    def _ready(self, group: WorkerGroup, kind: type, arguments: list[tuple]) -> WorkerGroup:
        if group not in self._made:
            for member, own in zip(group.members, arguments, strict=True):
                member.begin("make", kind, *own)
            group.results("make")
            self._made.add(group)
        return group

    def _check_node(self) -> None:
        if self._replaces and Connection(os.dup(self._control.fileno())).poll():
            raise WorkerLost("the node died since it was started; the next attempt starts a new one")

    def _group(self, names: tuple[str, ...]) -> WorkerGroup:
        return WorkerGroup([self._start(name) for name in names], self._called)

    def _start(self, name: str) -> Worker:
        ours, theirs = socket.socketpair()
        with self._starting:  # a rollout may replace its engine beside a training that replaces its ranks
            socket.send_fds(self._control, [name.encode()], [theirs.fileno()])
            process = int(self._control.recv(100))
        theirs.close()
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
        process = _fork(lambda own=connections[0]: _work(control, own))
        os.close(connections[0])
        control.send(str(process).encode())


def _work(control: socket.socket, own: int) -> None:
    control.close()
    connection, held = Connection(own), None
    while True:
        try:
            method, arguments, options = connection.recv()
        except EOFError:  # no more requests can come
            return
        try:
            if method == "make":
                held = arguments[0](*arguments[1:])
                connection.send((True, None))
            else:
                connection.send((True, getattr(held, method)(*arguments, **options)))
        except RatchetError as error:
            connection.send((False, error))


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
