"""The meeting of the processes of a group on a Ray cluster: torch's store of a process group, kept by Ray. Nothing of
it listens, and who has no token of the cluster can neither read nor write it. Groups are few and small: Ray keeps some
hundred short values of each until the group ends."""

from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from ray.experimental import internal_kv

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NAMESPACE = "ratchet-meeting"
_SCHEME = "ratchet-ray"


def meeting(group: str) -> str:
    """URL at which the processes of a group meet; its name is that of their actors."""
    return f"{_SCHEME}:///{group}"


def forget(prefix: str) -> int:
    """Forget what groups have left whose names begin with `prefix`; returns the number of values."""
    return internal_kv._internal_kv_del(f"{prefix}/", del_by_prefix=True, namespace=_NAMESPACE)


def left(prefix: str) -> list[str]:
    """Keys of the values that groups have left whose names begin with `prefix`."""
    return [key.decode() for key in internal_kv._internal_kv_list(f"{prefix}/", namespace=_NAMESPACE)]


@cache
def enable() -> None:
    """Let torch know such URLs in this process, also if it was a rank before."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    from tasks.workers.kept_by_ray import RayStore

    def met(url: str, timeout: timedelta, **_options: object) -> Iterator[tuple["Store", int, int]]:
        place = urlparse(url)
        numbers = dict(pair.split("=") for pair in place.query.split("&"))
        store = RayStore(place.path.lstrip("/"), _NAMESPACE, timeout)
        yield store, int(numbers["rank"]), int(numbers["world_size"])

    register_rendezvous_handler(_SCHEME, met)
