"""Processes of a site: started without a terminal, recognised by id and start time, ended with all they started."""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from flows.site.folder import RunningProcess
from tasks.config.code_version import PROJECT_ROOT, code_version

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


def end(running: RunningProcess, grace_s: float = _GRACE_S) -> bool:
    """End a process and everything it has started: asked first, killed after `grace_s`.

    Returns:
        Whether it was still running.
    """
    process = find(running)
    if process is None:
        return False
    tree = [process, *process.children(recursive=True)]
    for one in tree:  # a worker that is asked alone lets its flow runs go on
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    return True


def listening_on(port: int) -> list[int | None]:
    """Processes that listen on a TCP port of this machine; None is one of another user."""
    found = psutil.net_connections("tcp")
    return [one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port]
