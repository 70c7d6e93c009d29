"""Processes of the real stack and of sites, forked from some that have imported what they need.

Of the 40 s of processor of a start of the real stack, imports take more than half.

`python -m tests.forked_python KIND FOLDER PID` serves at a socket there until process PID has ended.
"""

import array
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.fork_servers import PROJECT
from tests.prefect_home import once

if TYPE_CHECKING:
    import pytest

MODULES = {
    "engine": ("tasks.engine.vllm.core", "tasks.engine.vllm.engine", "tasks.engine.vllm.on_cpu"),
    "rank": ("tests.trainer_core.preload",),
    "command": (
        "flows.run",
        "flows.cli.first_run",
        "flows.proof.prove",
        "flows.server.temporary",
        "flows.server.sqlite",
        "flows.deployments.retrain",
        "flows.deployments.runs",
        "flows.deployments.stored",
        "flows.site.up",
        "prefect.engine",
        "uvicorn",
        "prefect.server.api.server",
        "prefect.server.database.alembic_commands",
        "alembic.command",
        "ray.dashboard.head",
        "ray.dashboard.agent",
        "ray._private.runtime_env.agent.runtime_env_agent",
        "ray._private.log_monitor",
        "ray.autoscaler._private.monitor",
    ),
}
_CLIENT = PROJECT / "tests" / "forked_client.py"
_FOLDER = "forked-python"
_LOOK_S = 1.0
_MOST_FILES = 64
_LIFELINE, _SAFE = 499, 500  # numbers that no file of a client has


def forked_python(factory: "pytest.TempPathFactory", *kinds: str) -> str:
    """Path of a Python whose processes of these kinds are forked, and those of others begin as always.

    All processes of this run of the tests share the servers.
    """
    folder = once(_FOLDER, factory, _write)
    for kind in kinds or MODULES:
        once(f"{_FOLDER}/{kind}", factory, _start)
    return str(folder / "python")


def of_workers(python: Path) -> dict[str, str]:
    """The variable by which Ray starts its workers with that Python."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": str(python)}})}


def start_forked(patch: "pytest.MonkeyPatch", factory: "pytest.TempPathFactory") -> None:
    """Let this process start Ray and its workers, and other processes, as forked ones."""
    python = forked_python(factory)
    patch.setattr(sys, "executable", python)
    for name, value in of_workers(Path(python)).items():
        patch.setenv(name, value)


@dataclass(frozen=True)
class Finished:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


def own(process: psutil.Process) -> psutil.Process:
    """The forked process for which this one stands; this one if it stands for none, or for none yet."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        line = process.cmdline()
        if str(_CLIENT) in line:
            folder = Path(line[line.index(str(_CLIENT)) + 1])
            return psutil.Process(int((folder / f"{process.pid}").read_text()))
    return process


def tree(process: psutil.Process) -> list[psutil.Process]:
    """The process and all below it, with those that are forked."""
    found, forked = [process], own(process)
    if forked != process:
        found.append(forked)
    with suppress(psutil.NoSuchProcess):
        found += [one for child in forked.children() for one in tree(child)]
    return found


def _write(folder: Path) -> None:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {_CLIENT} {folder} {sys.executable} "$@"\n')
    script.chmod(0o755)


def _start(folder: Path) -> None:
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    python = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.forked_python"]
    words = [folder.name, str(folder.parent), str(owner)]
    server = subprocess.Popen([*python, *words], cwd=PROJECT, start_new_session=True)
    while not (folder / "socket").exists():
        assert server.poll() is None, "the server has failed: see its message"
        time.sleep(0.1)


def serve(address: str, owner: psutil.Process) -> None:
    """Fork a process for each client until `owner` has ended, and tell the client how it ends."""
    children: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        while owner.is_running():
            for ready in select.select([listener, woken], [], [], _LOOK_S)[0]:
                if ready is woken:
                    woken.recv(4096)
                    continue
                client, _ = listener.accept()
                order, files = _received(client)
                if not (child := os.fork()):
                    _become(order, files)
                for file in files:
                    os.close(file)
                children[child] = client
                _tell(client, child)
            _bury(children)
    os._exit(0)  # without word of the children, which end with their clients


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    _, passed, _, _ = client.recvmsg(1, socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize))
    text = b"".join(iter(lambda: client.recv(1 << 16), b""))
    return json.loads(text), array.array("i", passed[0][2]).tolist()


def _tell(client: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # the client may have ended first
        client.sendall(f"{number}\n".encode())


def _bury(children: dict[int, socket.socket]) -> None:
    for child, client in list(children.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with client:
                _tell(client, os.waitstatus_to_exitcode(status))
            del children[child]


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Turn this process into the one that was asked for."""
    code = 70
    try:
        os.setsid()  # Ray ends the group of processes of a worker
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, ignored in order["ignored"].items():  # by the client; who started the server is another process
            default = signal.default_int_handler if int(number) == signal.SIGINT else signal.SIG_DFL
            signal.signal(int(number), signal.SIG_IGN if ignored else default)
        _take(order["files"], files)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(file, mode, closefd=False) for file, mode in enumerate("rww"))
        sys.stderr.reconfigure(errors="backslashreplace", line_buffering=True)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        _execute(order["arguments"])
        code = 0
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise
    finally:
        with suppress(ValueError):
            sys.stdout.flush()
        os._exit(code)


def _take(numbers: list[int], files: list[int]) -> None:
    """Give the files of the client the numbers that they have there, and let this process die with the client."""
    safe = [fcntl.fcntl(file, fcntl.F_DUPFD, _SAFE) for file in files]
    os.closerange(3, _SAFE)  # those of the server
    for number, file in zip([*numbers, _LIFELINE], safe, strict=True):
        os.dup2(file, number)
        os.close(file)
    fcntl.fcntl(_LIFELINE, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(_LIFELINE, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(_LIFELINE, fcntl.F_SETFL, fcntl.fcntl(_LIFELINE, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(_LIFELINE, False)
    if select.select([_LIFELINE], [], [], 0)[0]:
        os._exit(70)  # the client has ended already


def _execute(arguments: list[str]) -> None:
    sys.executable = str(Path(sys.argv[2]) / "python")  # what this one starts is forked too
    if "prefect" in sys.modules:  # it has read its settings at the import, as Ray has
        importlib.import_module("prefect.context").refresh_global_settings_context()
        if "PREFECT_LOGGING_LEVEL" in os.environ:  # else `prepare_process` gives what the server has
            importlib.import_module("prefect.logging.configuration").setup_logging(incremental=False)
    if "ray" in sys.modules:
        importlib.import_module("ray._raylet").Config.initialize("")
        if "RAY_RAYLET_PID" in os.environ:  # an agent ends if its parent is another process
            os.environ["RAY_RAYLET_PID"] = f"{os.getppid()}"
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        multiprocessing.set_executable(sys.executable)
        exec(arguments[1], vars(importlib.import_module("__main__")))
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from tasks.config.environment import engine_environment, prepare_process, trainer_environment

    kind, folder, owner = sys.argv[1:]
    prepare_process()
    if kind != "command":
        of_kind = engine_environment if kind == "engine" else trainer_environment
        os.environ.update(of_kind("cpu", gpus=(), local=True))
        sys.modules["ray"] = None  # a worker loads it: Ray then takes its job from the environment
    for module in MODULES[kind]:
        importlib.import_module(module)
    importlib.import_module("tasks.config.code_version").code_version()  # computed once for all
    if kind != "command":
        del sys.modules["ray"]
    gc.freeze()  # else each process would copy the imported modules when it first collects garbage
    serve(f"{folder}/{kind}/socket", psutil.Process(int(owner)))
