"""Processes of a site: started without a terminal, recognised by id and start time, ended with all they started.

A mark in their environment finds those that nothing recorded.
"""

import contextlib
import errno
import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from flows.site.folder import RunningProcess
from tasks.config.code_version import PROJECT_ROOT, code_version
from tasks.config.environment import site_mark

HOST = "127.0.0.1"
"""Where the server listens."""

_GRACE_S = 20.0
"""How long a flow run may take to end cleanly: Ray, ranks and engines go with it."""
_SAME_S = 0.05


def start(role: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> RunningProcess:
    """Start a process that outlives this one; what it says is added to `log`."""
    with log.open("ab") as output:
        log.chmod(0o600)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=PROJECT_ROOT,
            env=dict(environment),
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    return RunningProcess(role=role, process=process.pid, started=started, version=code_version())


def find(running: RunningProcess) -> psutil.Process | None:
    """The process, if it still runs; another one with the same id is not it."""
    try:
        process = psutil.Process(running.process)
        same = abs(process.create_time() - running.started) < _SAME_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def strays(folder: Path, recorded: Iterable[RunningProcess], command: str | None = None) -> list[psutil.Process]:
    """Processes of a site that no record names, topmost only: `up` was killed before it wrote one, or their parent was.

    Args:
        folder: of the site.
        recorded: the processes that are recorded; their descendants are no strays.
        command: only those that have this word in their command line.
    """
    known = {process.pid for one in recorded if (process := find(one)) is not None}
    marked = {process.pid: process for process in psutil.process_iter() if _is_marked(process, folder)}
    found = []
    for process in marked.values():
        with contextlib.suppress(psutil.Error):
            above = {one.pid for one in process.parents()}
            if process.pid in known or above & (known | marked.keys()) or os.getpid() == process.pid:
                continue
            if command is None or command in process.cmdline():
                found.append(process)
    return found


def _is_marked(process: psutil.Process, folder: Path) -> bool:
    name, value = site_mark(folder)
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name) == value
    return False


def end(running: RunningProcess, grace_s: float = _GRACE_S) -> bool:
    """End a process and everything it has started: asked first, killed after `grace_s`.

    Returns:
        Whether it was still running.
    """
    process = find(running)
    if process is None:
        return False
    end_tree(process, grace_s)
    return True


def end_starter(running: RunningProcess, grace_s: float = _GRACE_S) -> bool:
    """End a process that may start others until its end: killed at once, and what it has started as `end` does.

    A worker that is asked to end may start a flow run again that ended a moment before, and stays alive with it.
    """
    process = find(running)
    if process is None:
        return False
    started = process.children(recursive=True)
    _kill([process])
    _end(started, grace_s)
    return True


def end_tree(process: psutil.Process, grace_s: float = _GRACE_S) -> None:
    """End a process and everything it has started, as `end` does."""
    _end([process, *process.children(recursive=True)], grace_s)


def _end(processes: Sequence[psutil.Process], grace_s: float) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    _kill(alive)


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and everything it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill([process, *process.children(recursive=True)])


def _kill(processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(processes, timeout=_GRACE_S)


def taken(port: int) -> str | None:
    """Why no server can have TCP port `port` of the loopback interface; None if one can."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
            return f"is taken by process {one.pid or 'of another user'}"
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "is taken by a connection, which may have ended a minute ago: those get ports above 32767"
        return f"cannot be had: {os.strerror(error.errno or 0)}"
    return None
