"""Hosts and clusters that cannot be used are refused by their address, with a repair."""

import socket

import pytest

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.workers import cluster
from tasks.workers.cluster import Cluster
from tasks.workers.hosts import HostFacts, unlike

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


@pytest.mark.parametrize("clock", [945.0, 1000.0, 1030.0, 1085.0])
def test_clocks_that_differ_by_seconds_are_of_no_concern(clock):
    assert unlike("10.0.0.2", HERE._replace(clock=clock), HERE, AFTER) is None


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
