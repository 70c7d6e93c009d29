"""The temporary Prefect server: its address, its end, and its message when it cannot work."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server import temporary as server_module
from flows.server.temporary import TemporaryServer, prefect_server
from storage.errors import InputError, WorkerLost
from tests.forked_python import forked_python, own

PROJECT = Path(__file__).resolve().parents[3]


def listening(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return {tuple(found.laddr) for found in connections if found.status == psutil.CONN_LISTEN}


def check_refused(port: int) -> None:
    refused = pytest.raises(InputError, match=f"127.0.0.1:{port}/api does not answer .* unset it")
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}), refused, prefect_server():
        pass


def test_it_listens_on_the_loopback_interface_only(prefect_server: TemporaryServer):
    port = int(prefect_server.url.split(":")[2].split("/")[0])
    assert listening(prefect_server.pid) == {("127.0.0.1", port)}


@pytest.mark.slow
def test_it_ends_when_its_parent_is_killed(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory):
    code = (
        "import time; from flows.server import temporary as t; print(t.TemporaryServer().pid, flush=1); time.sleep(600)"
    )
    python = forked_python(tmp_path_factory, "command")
    parent = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    assert parent.stdout is not None
    child = own(psutil.Process(int(parent.stdout.readline())))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    # it first finishes making the tables of its database
    assert child.status() != psutil.STATUS_ZOMBIE
    gone, alive = psutil.wait_procs([child], timeout=120)
    assert gone
    assert not alive


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "_STARTS", 1)
    monkeypatch.setattr(sys, "executable", forked_python(tmp_path_factory, "command"))
    database = tmp_path / "missing" / "prefect.db"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{database}")
    with (
        TemporaryServer() as server,
        pytest.raises(WorkerLost, match=r"cannot start\. Its last output: .*PREFECT_HOME"),
    ):
        server.wait(120)


def test_a_configured_server_that_does_not_answer_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    check_refused(port)


def test_a_port_taken_by_something_else_is_refused():
    def answer(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=answer, args=(taken,), daemon=True).start()
        check_refused(taken.getsockname()[1])


def test_a_configured_server_is_used(prefect_api: str):
    with prefect_server() as temporary:
        assert temporary is None
    assert prefect_api.startswith("http://127.0.0.1:")
