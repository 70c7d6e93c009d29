"""Runs inside the processes that vLLM starts: they listen nowhere, and none outlives the process that started it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import FileStore, HashStore, Store
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from storage.errors import RatchetError
from tasks.config.environment import engine_meeting_place

_WATCH = "ratchet-parent"


class OneWorker(UniProcExecutor):
    """vLLM's worker in the process of its scheduler."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class SeveralWorkers(MultiprocExecutor):
    """vLLM's workers in processes of their own, which import this module too."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


def executor(workers: int) -> type[Executor]:
    """vLLM's executor for that number of workers."""
    return OneWorker if workers == 1 else SeveralWorkers


def end_with_parent() -> None:
    """Kill this process as soon as the one that started it through `multiprocessing` has ended, however it ended.
    vLLM's own processes notice that late or, if they wait for each other, never. No effect in a process that was
    started otherwise."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def meet_without_listening() -> None:
    """Let the ranks of `tcp://` process groups meet in memory or at a file. Torch's own store for such a group accepts
    connections on every interface, whatever address it was given. Raises RatchetError: this torch has no such handlers,
    so its listeners would not be where they must be."""
    # its package holds a function of the same name
    handlers = vars(import_module("torch.distributed.rendezvous")).get("_rendezvous_handlers")
    if not isinstance(handlers, dict) or "tcp" not in handlers:
        raise RatchetError(
            "this torch has no torch.distributed.rendezvous._rendezvous_handlers, so vLLM cannot be kept from "
            "listening on every interface; install the release that pyproject.toml pins"
        )
    handlers["tcp"] = _met


def _met(url: str, timeout: timedelta, **_options: object) -> Iterator[tuple[Store, int, int]]:
    place = urlparse(url)
    query = parse_qs(place.query)
    rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
    alone = world_size == 1
    store = HashStore() if alone else FileStore(str(engine_meeting_place() / str(place.port)), world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size


end_with_parent()
meet_without_listening()
