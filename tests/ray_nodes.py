"""A Ray cluster on this machine's loopback interface, to which processes attach by its address."""

import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.cluster_utils import Cluster

from tasks.config.environment import ensure_ray_token, prepare_process
from tasks.workers.cluster import LOOPBACK, NAMESPACE, keep_loopback


@contextmanager
def ray_nodes(*cpus: int) -> Iterator[tuple[str, list[str]]]:
    """The address of a cluster, to which this process is attached, and Ray's names of its nodes, which have that many
    processors besides a head without any. It asks for the token."""
    prepare_process()
    ensure_ray_token()
    maybe_enable_token_auth_if_token_available()
    keep_loopback()
    common = {"node_ip_address": LOOPBACK, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        nodes = [cluster.add_node(num_cpus=count, **common).node_id for count in cpus]
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield cluster.address, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def unlike_node(address: str, cpus: int, folder: Path) -> Iterator[str]:
    """Ray's name of a node that has joined a cluster, and whose processes have another Python."""
    python, base = folder / "bin" / "python", Path(sys.executable).resolve()
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for one in (python.parent, packages):
        one.mkdir(parents=True)
    python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (packages / "sitecustomize.py").write_text('import platform\nplatform.python_version = lambda: "3.9.0"\n')
    given = RayParams(
        gcs_address=address, redis_address=address, node_ip_address=LOOPBACK, object_store_memory=80 << 20,
        include_log_monitor=False, num_cpus=cpus, num_gpus=0, min_worker_port=0, max_worker_port=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))  # with which Ray starts workers
        node = Node(given, head=False, shutdown_at_exit=False, spawn_reaper=False)
    try:
        deadline = time.monotonic() + 60
        while node.node_id not in {one["NodeID"] for one in ray.nodes() if one["Alive"]}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield node.node_id
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
