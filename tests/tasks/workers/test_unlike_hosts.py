"""Hosts and clusters that cannot be used are refused by their address, with a repair."""

import importlib.metadata
import re
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from ray._private.services import GCS_SERVER_EXECUTABLE
from ray.exceptions import GetTimeoutError, WorkerCrashedError

from storage.errors import InputError, RatchetError, WorkerLost
from tasks.config.environment import Settings, without_ray_token
from tasks.workers import cluster
from tasks.workers.cluster import Cluster
from tasks.workers.hosts import HostFacts, compared, host_facts, passed_over, unanswered, unlike

HERE = HostFacts("0.1.0+a", "3.12.3", 1000.0)
AFTER = HERE._replace(clock=1030.0)  # the others took their time to answer


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (HERE._replace(code="0.1.0+b"), ["host 10.0.0.2 has version 0.1.0+b of Ratchet", "install the same"]),
        (HERE._replace(python="3.12.9"), ["host 10.0.0.2 has Python 3.12.9, and this one 3.12.3", "install the same"]),
        (HERE._replace(clock=700.0), ["host 10.0.0.2 is 300 s behind", "time server"]),
        (HERE._replace(clock=1330.0), ["host 10.0.0.2 is 300 s ahead of", "time server"]),
    ],
)
def test_a_host_that_is_unlike_this_one_is_named_with_the_repair(there, words):
    found = unlike("10.0.0.2", there, HERE, AFTER)
    assert [word for word in words if word not in (found or "")] == []


@pytest.mark.parametrize(
    ("libraries", "words"),
    [
        ({"torch": "2.9.0", "vllm": "0.26.0"}, "10.0.0.3 has torch 2.9.0, and host 10.0.0.2 torch 2.9.1: .* install"),
        ({"torch": "2.9.1"}, "10.0.0.3 has no vllm, and host 10.0.0.2 vllm 0.26.0"),
        (
            {"torch": "2.9.1", "vllm": "0.26.0", "NVIDIA driver": "580.65"},
            "10.0.0.3 has NVIDIA driver 580.65, .* no NV",
        ),
    ],
)
def test_hosts_of_a_role_have_the_same_libraries_whatever_this_one_has(libraries, words):
    first = ("10.0.0.2", HERE._replace(libraries={"torch": "2.9.1", "vllm": "0.26.0"}))
    assert compared([first, ("10.0.0.3", first[1])], HERE, AFTER) == [None, None]
    unfit = ("10.0.0.1", first[1]._replace(python="3.12.9", libraries=libraries))  # it decides for no other one
    found = compared([unfit, first, ("10.0.0.3", HERE._replace(libraries=libraries))], HERE, AFTER)
    assert re.match("host 10.0.0.1 has Python 3.12.9", found[0] or "")
    assert found[1] is None
    assert re.search(words, found[2] or "")
    assert host_facts().libraries["torch"] == importlib.metadata.version("torch")


def test_a_host_that_joins_after_a_loss_and_cannot_be_used_is_passed_over_and_one_of_a_beginning_is_refused():
    unfit, silent = InputError("host 10.0.0.3 has Python 3.12.9"), WorkerLost("host 10.0.0.2 does not answer")
    full = unanswered("10.0.0.4", crashed := WorkerCrashedError())
    full.__cause__ = crashed
    flaws: dict[str, RatchetError] = {"two": silent, "three": unfit, "four": full}
    assert passed_over(flaws, ["one", "two"]) == {"three": unfit, "four": full}
    assert passed_over(flaws, ["two", "four"]) == {"three": unfit}  # a process died on a host that has served before
    with pytest.raises(InputError, match=r"3\.12\.9"):
        passed_over(flaws, [])
    assert passed_over({"two": silent, "four": full}, []) == {}


@pytest.mark.parametrize("clock", [945.0, 1000.0, 1030.0, 1085.0])
def test_clocks_that_differ_by_seconds_are_of_no_concern(clock):
    assert unlike("10.0.0.2", HERE._replace(clock=clock), HERE, AFTER) is None


def test_a_process_that_cannot_begin_on_a_host_is_told_with_what_may_be_full():
    lost = unanswered("10.0.0.2", WorkerCrashedError())
    assert str(lost).startswith(
        "host 10.0.0.2: the process that was to work there has died; free space in its temporary"
    )
    assert str(unanswered("10.0.0.2", GetTimeoutError("late"))) == "host 10.0.0.2 does not answer (late)"


def test_a_cluster_that_others_can_reach_is_not_used_without_a_token(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "maybe_enable_token_auth_if_token_available", lambda warn_if_disabled: False)
    monkeypatch.setattr(cluster, "LOOPBACK", "127.0.0.9")  # so that 127.0.0.1 counts as an address of a network
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:{1}".format(*server.getsockname())
        settings = Settings(ray_address=address, gpus=())
        with (
            Cluster(settings) as unsafe,
            pytest.raises(InputError, match=f"{address} .* without a token.*RAY_AUTH_MODE"),
        ):
            unsafe.start()


@contextmanager
def head(folder, **variables):
    """The address of the server of a Ray head with these variables."""
    folder.mkdir()
    folders = [f"--log_dir={folder}", f"--session-dir={folder}", "--session-name=test"]
    command = [GCS_SERVER_EXECUTABLE, "--gcs_server_port=0", "--node-ip-address=127.0.0.1", *folders]
    server = subprocess.Popen(command, env={**without_ray_token(), **variables}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (found := list(folder.glob("gcs_server_port*"))):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{found[0].read_text()}"
    finally:
        server.kill()
        server.wait()


def test_a_cluster_that_does_not_ask_for_the_token_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "maybe_enable_token_auth_if_token_available", lambda warn_if_disabled: True)
    with head(tmp_path / "closed", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="5" * 64) as address:
        cluster.refuse_open(address)
    with (
        head(tmp_path / "open") as address,
        Cluster(Settings(ray_address=address, gpus=())) as unsafe,
        pytest.raises(InputError, match=f"{address} does not ask for the token .*, and no token"),
    ):
        unsafe.start()
