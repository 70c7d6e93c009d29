"""A Ray cluster on this machine's loopback interface, to which processes attach by its address."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
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
