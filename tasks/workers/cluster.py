"""Ray: our own local one, which listens on the loopback interface only, or a cluster to attach to."""

import logging
import math
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.services as ray_services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from storage.errors import InputError, RatchetError, WorkerLost, first_line
from storage.ownership.scratch import socket_folder
from tasks.config.environment import Settings, chooses_ray_authentication, ensure_ray_token, without_ray_token
from tasks.workers.connection import CONNECTION
from tasks.workers.logs import silence_terminal

NAMESPACE = "ratchet"
LOOPBACK = "127.0.0.1"

_OBJECT_STORE_BYTES = 200 << 20  # what passes through it is small: token ids, log-probabilities, manifests
_ATTACH_DEADLINE_S = 60.0  # with a wrong token Ray itself tries for 20 s or more
_CONNECT_DEADLINE_S = 5.0
_ANSWER_DEADLINE_S = 15.0
_LINGER_S = 1.0
_LOOK_S = 5.0  # between two looks at all processes of this machine; one took 0.4 s while a state was being stored
_END_DEADLINE_S = 5.0
_ALONE_S = 86_400  # how long this process outlives the head of our own Ray; a stage that needs Ray starts a new one

_VITAL = ("gcs_server", "raylet")

_LASTING = ThreadPoolExecutor(1, "ray")
"""A thread that lives as long as this process."""

_ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
"""Program that connects to a cluster without a token; it ends with 0 if that was accepted."""


class Cluster(AbstractContextManager["Cluster", None]):
    """Ray for one flow process. Starts on first use; as a context manager it is shut down at the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings  # the environment as it was when the process began
        self._started = False
        self._roots: list[psutil.Process] = []
        self._vital: dict[str, psutil.Process] = {}
        self._seen: set[psutil.Process] = set()
        self._looked = -math.inf  # time of the last look and answer, on the steady clock
        self._folder = ExitStack()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def local(self) -> bool:
        """True if this Ray is our own and ends with this process."""
        return self.settings.local

    @property
    def node(self) -> int | None:
        """Process id of the raylet that we started; None if there is none."""
        raylet = self._vital.get("raylet")
        return None if raylet is None else raylet.pid

    def start(self) -> None:
        """Start the local Ray or attach to the cluster; no effect if that is done. Raises InputError (the cluster does
        not answer at RAY_ADDRESS, or refuses the token), WorkerLost (a local Ray does not start) or RatchetError (this
        process is connected to another Ray)."""
        if self._started:
            return
        if ray.is_initialized():
            raise RatchetError("this process is already connected to another Ray; call ray.shutdown() first")
        if self.settings.ray_address is None:
            # the kernel ends what a thread has started with that thread, and that of a rollout ends
            in_main = threading.current_thread() is threading.main_thread()
            self._start_local() if in_main else _LASTING.submit(self._start_local).result()
        else:
            _attach(self.settings.ray_address)
        silence_terminal()
        self._started = True

    def check_alive(self) -> None:
        """Make sure that Ray, if it was started, lives. Raises WorkerLost: a process of our own has ended, or Ray does
        not answer, which our own is asked every few seconds. Its remains have been cleared away, so the next `start`
        starts a new one."""
        if not self._started:
            return
        try:
            self._check()
        except WorkerLost:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the cluster, or end the local Ray with all its processes; no effect if it was not started."""
        if not self._started:
            return
        tree = {*self._seen, *self.processes()}  # those whose parent has died are no longer our children
        with CONNECTION.leaving():
            ray.shutdown()
        _end(tree)
        self._folder.close()
        self._roots, self._vital, self._seen, self._looked = [], {}, set(), -math.inf
        self._started = False

    def processes(self) -> list[psutil.Process]:
        """The processes of the local Ray, its workers included."""
        return _with_descendants(self._roots)

    def _start_local(self) -> None:
        ensure_ray_token()
        keep_loopback()
        try:
            with _sigterm_kept():
                ray.init(
                    address="local",  # not one whose address an earlier `ray start` on this machine left behind
                    # who can write to the folder of its sockets can take them over, and Ray lets every user do so
                    _temp_dir=str(self._folder.enter_context(socket_folder())),
                    _node_ip_address=LOOPBACK,
                    num_cpus=0,  # no idle workers are started, and our actors reserve no CPU
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=True,
                    logging_level=logging.ERROR,
                    namespace=NAMESPACE,
                    # after a minute without it Ray would end this process, which may score or evaluate meanwhile
                    _system_config={"gcs_rpc_server_reconnect_timeout_s": _ALONE_S},
                )
        except BaseException as error:  # also an interrupt, which leaves Ray's agents to live on for a while
            _end(_with_descendants(_children_of_ray()))
            self._folder.close()
            if not isinstance(error, Exception):
                raise
            # Ray raises plain ones, as when its node is not up in time
            raise WorkerLost(f"Ray did not start on this host: {error}") from error
        self._roots = _children_of_ray()
        self._vital = {root.name(): root for root in self._roots if root.name() in _VITAL}
        CONNECTION.check = self._check_processes

    def _check_processes(self) -> None:
        if dead := [name for name, process in self._vital.items() if not _is_alive(process)]:
            raise WorkerLost(f"{' and '.join(dead)} of the local Ray ended; a new one is started")

    def _check(self) -> None:
        self._check_processes()
        if self._vital and time.monotonic() - self._looked < _LOOK_S:
            return
        self._seen.update(self.processes())
        late = WorkerLost(f"Ray did not answer within {_ANSWER_DEADLINE_S:g} s; the next attempt starts over")
        if not any(node["Alive"] for node in _within(_ANSWER_DEADLINE_S, ray.nodes, late)):
            raise WorkerLost("Ray has no live node; the next attempt starts over")
        self._looked = time.monotonic()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the installed handler of SIGTERM, which Ray replaces in the main thread. Prefect's own reports that a flow
    run was cancelled; with Ray's, its process would report a crash. If none was installed, Ray's stays: it lets a
    process clean up before it ends."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _attach(address: str) -> None:
    repair = "check that the cluster is running, RAY_ADDRESS (host:port) and RAY_AUTH_TOKEN"
    near = _reachable(address, repair) in ("localhost", LOOPBACK)
    if near:
        keep_loopback()  # or Ray replaces the host by an address where such a cluster does not listen
    if maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        refuse_open(address)
    elif not near and not chooses_ray_authentication():  # no token, and nobody has said that none is wanted
        raise InputError(
            f"the Ray cluster at {address} is to be used without a token, so whoever reaches that address can run code "
            "on all its hosts: start Ray with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on each host and export both "
            "here, or export RAY_AUTH_MODE=disabled if the network is yours alone"
        )

    def attach() -> Any:
        return ray.init(address=address, namespace=NAMESPACE, log_to_driver=True, logging_level=logging.ERROR)

    late = InputError(f"the Ray cluster at {address} did not answer within {_ATTACH_DEADLINE_S:g} s: {repair}")
    try:
        _within(_ATTACH_DEADLINE_S, attach, late)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"cannot attach to the Ray cluster at {address} ({first_line(error)}): {repair}") from error


def refuse_open(address: str) -> None:
    """Raises InputError: the cluster asks for no token, which Ray does not tell those who have one. It would end every
    actor at once that is not detached."""
    command = [sys.executable, "-P", "-c", _ASK, address]
    try:
        asked = subprocess.run(command, env=without_ray_token(), capture_output=True, timeout=_ATTACH_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return  # nor will it answer now
    if asked.returncode == 0:
        raise InputError(
            f"the Ray cluster at {address} does not ask for the token that is exported here, so whoever reaches that "
            "address can run code on all its hosts: start Ray with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on each "
            "host, or, if the network is yours alone, export RAY_AUTH_MODE=disabled here too, and no token"
        )


def _reachable(address: str, repair: str) -> str:
    """The host of `address`, once something accepts a connection there; Ray itself would keep trying for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_DEADLINE_S).close()
    except (OSError, ValueError) as error:
        raise InputError(f"there is no Ray cluster at {address!r} ({error}): {repair}") from error
    return host


def keep_loopback() -> None:
    """Stop Ray from replacing 127.0.0.1 by the host's address, on which anyone could reach it. Raises RatchetError:
    this Ray has no such function, so its listeners would not be where they must be."""
    if "resolve_ip_for_localhost" not in vars(ray_services):
        raise RatchetError(
            f"Ray {ray.__version__} has no ray._private.services.resolve_ip_for_localhost, so it cannot be kept on the "
            "loopback interface; install the Ray release that pyproject.toml pins"
        )
    ray_services.resolve_ip_for_localhost = lambda host: host


def _within[T](deadline_s: float, work: Callable[[], T], late: RatchetError) -> T:
    """Run `work` in a daemon thread; raise `late` when it takes too long (the thread is then abandoned)."""
    pool = ThreadPool(1)
    try:
        return pool.apply_async(work).get(deadline_s)
    except multiprocessing.TimeoutError:
        raise late from None
    finally:
        pool.close()


def _children_of_ray() -> list[psutil.Process]:
    """Children of this process that run from Ray's installation; others may be Prefect's or the user's. A word of the
    command begins with that folder: a fork server of the user's has it inside the code that it was given."""
    package = str(Path(ray.__file__).parent)
    children = psutil.Process().children()
    return [child for child in children if any(word.startswith(package) for word in _command(child))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _with_descendants(roots: list[psutil.Process]) -> list[psutil.Process]:
    found = list(roots)
    for root in roots:
        try:
            found += root.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: Iterable[psutil.Process]) -> None:
    """Wait for `processes` to end; Ray's agents may linger for 20 s, so terminate, then kill them."""
    _, lingering = psutil.wait_procs(list(processes), timeout=_LINGER_S)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in lingering:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        _, lingering = psutil.wait_procs(lingering, timeout=_END_DEADLINE_S)
